"""`adloco train`: starts or resumes a run, in this process or on several ranks of this machine."""

import os
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from adloco.cli.arguments import MachinesCommand, argument
from adloco.cli.terminal import open_console, print_error, say
from adloco.errors import RANK_FAILURE, require

if TYPE_CHECKING:
    from adloco.cli.alerts import Alerts
    from adloco.cli.rank_processes import Machines
    from adloco.config.sections import Recipe

RESTARTS = 3
"""Number of restarts after failures of ranks with no round trained in between."""


@dataclass(kw_only=True)
class Train(MachinesCommand):
    """Train a recipe, or resume a run from its newest checkpoint."""

    key = "train"
    summary = "train a recipe, or resume a run"
    resume: Path | None = argument(None, "RUN")
    """Folder of the run to resume."""
    restart: bool = argument(False)
    """Resume the run in --run.folder if it has begun, else begin it; with --ranks, also each time
    that a rank is killed, stopped or cut off.
    """
    trust_recipe: bool = argument(False)
    """Resume although the recipe in the run's folder names code that the run did not begin with."""
    notify: str = argument("", "WHERE")
    """Receiver of alerts when the run fails, stalls, recovers, is stopped or ends: a command, which
    reads a sentence on its standard input, or an http(s) URL, to which it is posted as JSON
    (default: the environment variable ADLOCO_NOTIFY).
    """

    @staticmethod
    def overview() -> str:
        from adloco.cli.settings_help import settings_overview

        return settings_overview()

    def run(self) -> int:
        from adloco.cli.alerts import VARIABLE, Alerts

        with Alerts(self.notify or os.environ.get(VARIABLE, "")) as alerts:
            if not self.resume and "WORLD_SIZE" not in os.environ:
                self.read_recipe()  # Refused at once: what is imported below takes seconds.
            return self._train(alerts)

    def own_recipe(self) -> "Recipe":
        """The recipe of the line, or that of the run that it resumes."""
        from adloco.run.stored import resumed_recipe

        if self.resume:
            return resumed_recipe(self.resume, self.settings, trust_recipe=self.trust_recipe)
        return self.read_recipe()

    def _train(self, alerts: "Alerts") -> int:
        from adloco.cli.rank_processes import Machines
        from adloco.cli.train_here import train_here
        from adloco.distributed.launch.launcher import num_ranks
        from adloco.run.changes import absolute_budgets

        resumed = self.resume
        if resumed:
            self.settings = absolute_budgets(resumed, self.settings)
        require(
            not (resumed and self.recipe),
            f"--resume takes the recipe of the run; leave out {self.recipe}",
        )
        require(
            not (resumed and self.restart),
            "--restart resumes the run in --run.folder; leave out --resume",
        )
        machines = Machines.read(self.machines, self.meet)
        require(
            machines is None or self.restart,
            "--machines needs --restart and --run.folder, so that each machine resumes the run",
        )
        tasks = int(os.environ.get("SLURM_STEP_NUM_TASKS", "1"))
        if tasks > 1 and "WORLD_SIZE" not in os.environ and not machines:
            say(
                open_console(),
                f"srun started {tasks} tasks, and each that has this command trains the whole run "
                "by itself; let it start torchrun, once on each node, as adloco launch --on slurm "
                "does",
            )
        if (self.ranks != 1 or machines) and num_ranks() == 1:
            return _run_on_ranks(self, machines, alerts)
        return train_here(self, alerts)


def _run_on_ranks(arguments: Train, machines: "Machines | None", alerts: "Alerts") -> int:
    """Train in several processes and return the exit code.

    If memory runs out in a step that cannot be repeated, all ranks start again from the newest
    checkpoint with smaller micro-batches. With `--restart` they also do after a rank was killed,
    or it alone is started again if the others recover (`run.on_rank_failure`), until that has
    happened `RESTARTS` times without a round in between.
    """
    from adloco.cli import elastic_room
    from adloco.cli.rank_processes import on_ranks, ranks_needed
    from adloco.cli.train_here import train_here
    from adloco.distributed.launch.local_ranks import INTERRUPTED
    from adloco.run import out_of_memory
    from adloco.run.folder import new_folder
    from adloco.run.restarted import begun_run
    from adloco.run.stored import changeable, is_complete, resumed_recipe

    count, words, resumed = arguments.ranks, arguments.words, arguments.resume
    trust = arguments.trust_recipe
    recipe = arguments.own_recipe()
    elastic_room.check_settings(recipe.run)
    if arguments.restart:
        # Refused here, once; whether it has begun, the ranks see by themselves.
        begun = begun_run(recipe, trust_recipe=trust)
        resumed = Path(recipe.run.folder)
        if machines and begun:
            changed = [(name, text) for name, text in arguments.settings if name in changeable()]
            if is_complete(begun, resumed_recipe(begun, changed, trust_recipe=trust)):
                # The others have ended, so it would wait for them in vain.
                say(open_console(), f"the run in {begun} is complete")
                return 0

    def start(line: list[str]) -> int:
        """Start the ranks, after drops as many as the workers that are left can use."""
        begun = begun_run(recipe, trust_recipe=trust) if arguments.restart else None
        needed = count
        if begun and not machines:  # Another machine could not know how many start here.
            needed = ranks_needed(count, resumed_recipe(begun, (), trust_recipe=trust))
        if needed < count:
            say(open_console(), f"{needed} of {count} ranks start, because workers were dropped")
        if needed == 1 < count:
            return train_here(arguments, alerts)
        return on_ranks(needed, recipe, line, recovery=recovery, machines=machines)

    told = ["--notify", arguments.notify] if arguments.notify else []
    with nullcontext(resumed) if resumed else new_folder(recipe) as folder:
        alerts.about = str(folder)
        if arguments.restart:
            begin = again = words
        elif resumed:
            # The folder's recipe has the old values of changed settings: a restart names them.
            settings = [f"--{name}={value}" for name, value in arguments.settings]
            given = [*settings, *["--trust-recipe"] * trust, *told]
            begin = again = ["train", "--resume", str(folder), *given]
        else:
            begin = [*words, "--run.folder", str(folder)]
            again = ["train", "--resume", str(folder), *told]
        failures = _FailureCount(folder)
        recovery = elastic_room.recovery(recipe, failures.one_more if arguments.restart else None)
        limit = out_of_memory.limit(folder)
        code = start(begin)
        while code not in (0, INTERRUPTED):
            if out_of_memory.limit(folder) != limit:
                limit = out_of_memory.limit(folder)
                why = f", with micro-batches of at most {limit}"
            elif arguments.restart and code == RANK_FAILURE and failures.one_more():
                why = " because a rank failed"
            else:
                break
            sentence = f"the ranks start again from the newest checkpoint{why}"
            print_error(sentence)
            alerts.tell("recovered", sentence)
            code = start(again)
        if code not in (0, INTERRUPTED):
            alerts.failed(f"its ranks ended with exit code {code}")
        if code == 0 and machines:  # The report was said where rank 0 is.
            say(open_console(trains=True), f"the run in {folder} is complete")
        return code


class _FailureCount:
    """Counts failures of ranks, so that a run ends of which one fails in each round.

    folder: The run's folder, as this machine sees it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._rounds = self._trained()
        self._in_a_row = 0

    def one_more(self) -> bool:
        """Count a failure; return False if `RESTARTS` came before it without a round in between."""
        rounds = self._trained()
        self._in_a_row = 1 if rounds > self._rounds else self._in_a_row + 1
        self._rounds = rounds
        return self._in_a_row <= RESTARTS

    def _trained(self) -> int:
        from adloco.run.checkpoint import newest_round
        from adloco.run.folder import CHECKPOINTS
        from adloco.run.records import Records

        # Without a shared folder only the first machine has records; all have checkpoints.
        recorded = int(Records(self._folder).newest().get("round", 0))
        return max(recorded, newest_round(self._folder / CHECKPOINTS))
