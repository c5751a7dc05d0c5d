"""`adloco compare`: several recipes or runs, on every axis, over several seeds."""

from dataclasses import dataclass

from adloco.cli.arguments import argument
from adloco.cli.study_arguments import StudyCommand
from adloco.config.sizes import read_number
from adloco.errors import require

UNTIL = ("tokens", "rounds", "inner_steps", "syncs")


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
    until: list[str] | None = argument(None, ("UNIT", "N"), nargs=2)
    """Budget of each run, in tokens, rounds, inner_steps or syncs."""

    def run(self) -> int:
        from adloco.cli.studies import run_study, study_settings
        from adloco.study.arms import plan_runs

        folder, common = study_settings(self, "compare-" + "-".join(self.whats))
        common += until_settings(self.until)
        runs = plan_runs(self.whats, common, self.seeds, folder)
        require(
            len(runs) > 1, "there is one run, and nothing to compare it with; name another WHAT"
        )
        return run_study(runs, self, folder, " / ".join(dict.fromkeys(run.arm for run in runs)))


def until_settings(until: list[str] | None) -> list[tuple[str, str]]:
    """The settings that give every run this budget and no other."""
    if not until:
        return []
    unit, text = until
    number = read_number(text)
    require(
        unit in UNTIL and isinstance(number, int) and number > 0,
        f"--until must be one of {', '.join(UNTIL)} and a number > 0, got {unit!r} {text!r}",
    )
    return [(f"run.{name}", str(number) if name == unit else "0") for name in UNTIL]
