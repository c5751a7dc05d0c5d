"""`adloco sweep`: a recipe over lists of settings."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from adloco.cli.arguments import RecipeCommand, StudyCommand, argument
from adloco.errors import require


@dataclass(kw_only=True)
class Sweep(RecipeCommand, StudyCommand):
    """Train a recipe over lists of settings, and compare the points.

    A setting with several values is an axis of the sweep:

      adloco sweep diloco --method.sync_every 20 50 100 --inner.lr 1e-3 2e-3

    The same command again continues where it was stopped.
    """

    key = "sweep"
    summary = "train a recipe over lists of settings"
    lists = True
    seeds: int = argument(1, "N")
    """Runs of each point (default: 1)."""
    samples: int = argument(0, "N")
    """Random points of the grid instead of all."""

    def run(self) -> int:
        from adloco.study.arms import planned_run
        from adloco.study.grid import point_name, sweep_axes, sweep_points

        recipe = self.recipe or "adloco"
        axes, fixed = sweep_axes(self.settings)
        self.settings = [*fixed]
        folder, common = self.study(f"sweep-{Path(recipe).stem}-{'-'.join(axes)}")
        points = {point_name(point): point for point in sweep_points(axes, self.samples)}
        runs = [
            planned_run(name, recipe, common, point, seed, folder)
            for name, point in points.items()
            for seed in range(self.seeds)
        ]
        arms: dict[str, str] = {}
        for run in runs[:: self.seeds]:  # Not before: 4e-3 and 0.004 are two texts.
            twin = arms.setdefault(repr(run.recipe), run.arm)
            require(twin == run.arm, f"{twin!r} and {run.arm!r} are the same; leave one out")

        from adloco.cli.studies import run_study  # It imports torch.
        from adloco.report.sweep_plots import draw_sweep

        draw = partial(draw_sweep, axes=axes, points=points, folder=folder)
        title = f"{Path(recipe).stem} over {', '.join(axes)}"
        return run_study(runs, self, folder, title, varied=list(axes), draw=draw)
