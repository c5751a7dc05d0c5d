"""`adloco compare`: several recipes or runs, on every axis, over several seeds."""

from dataclasses import dataclass

from adloco.cli.arguments import StudyCommand, argument
from adloco.errors import require


@dataclass(kw_only=True)
class Compare(StudyCommand):
    """Train what is missing; compare it over tokens, steps, syncs, bytes and time.

    WHAT is a recipe, a recipe with settings of its own, or the folder of a run:

      adloco compare adloco diloco local-sgd --run.tokens 300000
      adloco compare diloco 'H50=diloco@--method.sync_every 50' --link 100mbit,20ms
      adloco compare runs/mine runs/yours --targets 1.6,1.5

    Runs that are missing are trained in the study's folder (--run.folder). The same
    command again continues where it was stopped, and repeats no finished run.
    """

    key = "compare"
    summary = "compare recipes or runs on every axis"
    whats: list[str] = argument(metavar="WHAT", place=True, nargs="+")
    """Recipes or run folders."""

    def run(self) -> int:
        from adloco.study.arms import plan_runs

        folder, common = self.study("compare-" + "-".join(self.whats))
        runs = plan_runs(self.whats, common, self.seeds, folder)
        require(
            len(runs) > 1, "there is one run, and nothing to compare it with; name another WHAT"
        )
        from adloco.cli.studies import run_study  # It imports torch.

        return run_study(runs, self, folder, " / ".join(dict.fromkeys(run.arm for run in runs)))
