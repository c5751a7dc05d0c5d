"""`adloco evaluate`: prints the loss of a run's model on its validation text or on another text."""

from dataclasses import dataclass

from adloco.cli.arguments import ModelCommand, argument
from adloco.cli.terminal import open_console


@dataclass(kw_only=True)
class Evaluate(ModelCommand):
    """Print the loss of a run's model on its validation text, or on another text."""

    key = "evaluate"
    summary = "print the loss of a run's model"
    path: str | None = argument(None, "PATH", flag="--data.path")
    """Text file, folder, jsonl or parquet to evaluate on instead."""
    windows: int | None = argument(None, "N")
    """Windows to evaluate on, evenly spaced; 0: all (default: the run's evaluation.windows)."""

    def run(self) -> int:
        console = open_console()
        with console.status("evaluating ..."):
            trained = self.load()
            from adloco.run.trained import evaluate  # It imports torch.

            recipe = trained.stored.recipe
            measured, count, amiss = evaluate(trained, self.path, self.windows)
        console.print(f"trainer {trained.trainer} of {trained.stored.checkpoint}", soft_wrap=True)
        numbers = [
            f"{measure.label} {measure.text(measured[measure.name])} {measure.unit.name}".rstrip()
            for measure in recipe.task.measures
            if measure.name in measured
        ]
        console.print(f"{', '.join(numbers)}, over {count:,} {recipe.task.counted}", soft_wrap=True)
        if amiss:
            console.print(amiss, style="bold", soft_wrap=True)
        return 0
