"""`adloco ablate`: a recipe without each of its mechanisms, and without all."""

from dataclasses import dataclass
from pathlib import Path

from adloco.cli.arguments import RecipeCommand, StudyCommand, argument


@dataclass(kw_only=True)
class Ablate(RecipeCommand, StudyCommand):
    """Train a recipe, the same without each of its mechanisms, and without all.

    Mechanisms, and what the recipe is without them (docs/studies.md):

      adaptive-batch   the batch stays at batch.initial
      merging          all trainers live to the end
      switch-mode      what does not fit is accumulated at once, not above n times
      accumulation     the batch is capped at what fits
    """

    key = "ablate"
    summary = "train a recipe without each of its mechanisms"
    without: list[str] | None = argument(None, "NAME,...")
    """Mechanisms to leave out (default: those of adaptive-batch, merging and switch-mode that the
    recipe has).
    """

    def run(self) -> int:
        from adloco.study.ablation import ablated_arms, own_mechanisms
        from adloco.study.arms import planned_run

        recipe = self.recipe or "adloco"
        stem = Path(recipe).stem
        folder, common = self.study(f"ablate-{stem}")
        whole = planned_run(stem, recipe, common, (), 0, folder).recipe
        names = own_mechanisms(whole) if self.without is None else self.without
        runs = [
            planned_run(name, recipe, common, flags, seed, folder)
            for name, flags in ablated_arms(whole, names).items()
            for seed in range(self.seeds)
        ]
        from adloco.cli.studies import run_study  # It imports torch.

        return run_study(runs, self, folder, f"{stem} without {', '.join(names)}")
