"""`adloco gradients`: measures the full gradient and the noise of batches around it."""

from dataclasses import dataclass
from typing import Any

from rich.table import Table

from adloco.cli.arguments import TrainerCommand, argument
from adloco.cli.progress import shown_progress
from adloco.cli.terminal import open_console, table_of


@dataclass(kw_only=True)
class Gradients(TrainerCommand):
    """Compute the full gradient over training samples at a checkpoint of a run, and the noise scale
    of the model and of each layer, from how far the gradients of batches deviate from it. Dropout
    is off. Writes a JSON file into RUN/gradients, which `adloco report RUN` shows.
    """

    key = "gradients"
    summary = "measure a run's gradients and their noise at a checkpoint"
    samples: int | None = argument(None, "N")
    """Samples of the full gradient, the first ones of the run's data streams; 0: all of the
    training data (default: 512).
    """
    batch: int | None = argument(None, "N")
    """Samples of a batch (default: what the run takes in one pass)."""
    checkpoint: int | None = argument(None, "ROUND")
    """Round of a checkpoint that the run has kept (default: the newest)."""

    def run(self) -> int:
        from adloco.lab.gradients.measuring import measure_gradients
        from adloco.lab.gradients.records import write_gradients
        from adloco.run.folder import shell_word
        from adloco.run.trained import load_trained

        console = open_console()
        with shown_progress(console, "gradients") as advance:
            trained = load_trained(
                self.run_folder, self.trainer, self.checkpoint, trust_recipe=self.trust_recipe
            )
            content = measure_gradients(trained, self.samples, self.batch, advance)
        path = write_gradients(trained.stored.folder, content)
        console.print(f"trainer {trained.trainer} of {trained.stored.checkpoint}", soft_wrap=True)
        console.print(_table(content))
        if any(part["noise_scale"] is None for part in (content["total"], *content["layers"])):
            console.print(
                "-: so few --samples do not tell |G|² from zero; it may be negative then",
                soft_wrap=True,
            )
        console.print(
            f"{content['samples']:,} samples in {content['num_batches']:,} batches of at most "
            f"{content['batch']:,}, loss {content['loss']:.4f}",
            soft_wrap=True,
        )
        report = f"adloco report {shell_word(self.run_folder)}"
        console.print(f"{path}; for the report: {report}", soft_wrap=True)
        return 0


def _table(content: dict[str, Any]) -> Table:
    table = table_of("part", "parameters", "|G|²", "S", "noise scale S/|G|²", names=1)
    for part in ({"name": "whole model", **content["total"]}, *content["layers"]):
        table.add_row(
            part["name"],
            f"{part['parameters']:,}",
            f"{part['grad_norm_sq']:.3g}",
            f"{part['grad_variance']:.3g}",
            "-" if part["noise_scale"] is None else f"{part['noise_scale']:,.1f}",
        )
    return table
