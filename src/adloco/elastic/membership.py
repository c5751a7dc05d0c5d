"""The states of a process of a run, what the others see of it, and what they do then.

`TABLE` holds all of it, and README.md shows it. The launchers look exit codes up in it, the watch
of each rank what it reads at the store, and the meeting those that are late.
"""

from dataclasses import dataclass
from enum import Enum

from adloco.distributed.launch.local_ranks import INTERRUPTED
from adloco.errors import RANK_FAILURE


class State(Enum):
    """The state of a process, as the others know it."""

    TRAINING = "in the newest quorum"
    WAITING = "at the meeting that finds the next quorum"
    JOINING = "has asked to be in a later quorum"
    SILENT = "not heard of for run.silent_seconds, or for 3 s of a meeting"
    GONE = "has ended"


class Seen(Enum):
    """An observation of a process by its launcher or another rank."""

    FINISHED = "exit code 0"
    ERROR = "another exit code, or an error at the store"
    GAVE_UP = "exit code 1"
    STOPPED = "exit code 130"
    KILLED = "ended by a signal"
    REPORTED = "its launcher or another rank says that it failed"
    CLOSED = "a closed connection"
    SILENCE = "silence"
    ARRIVAL = "says at the store that it is there"
    REQUEST = "asks at the store to join"
    CHOSEN = "in the next quorum"
    LEFT_OUT = "not in the next quorum"


class Action(Enum):
    """The answer to an observation."""

    END = "those that wait to join end too"
    END_ALL = "all ranks end with its exit code"
    REPLACE = "its launcher says so, and with --restart starts another process, which asks to join"
    MEET = "the members leave their group and meet; with run.on_rank_failure = stop they end"
    AWAIT = "the meeting waits for the other members"
    EXPEL = "its launcher, if there is one, kills it"
    ADMIT = "once a whole island asks, the members save after their round, and meet"
    JOIN = "asks to join"
    TRAIN = "trains from the newest checkpoint, or copies in memory that are newer"


@dataclass(frozen=True)
class Change:
    """The next state of a process, and the answer."""

    state: State
    action: Action


TABLE = {
    (State.TRAINING, Seen.FINISHED): Change(State.GONE, Action.END),
    (State.TRAINING, Seen.ERROR): Change(State.GONE, Action.END_ALL),
    # It could not recover from the failure of another member, so the others cannot either.
    (State.TRAINING, Seen.GAVE_UP): Change(State.GONE, Action.END_ALL),
    (State.TRAINING, Seen.STOPPED): Change(State.GONE, Action.REPLACE),
    (State.TRAINING, Seen.KILLED): Change(State.GONE, Action.REPLACE),
    (State.TRAINING, Seen.REPORTED): Change(State.GONE, Action.MEET),
    # It may be anybody who closed it: the meeting finds out who does not come.
    (State.TRAINING, Seen.CLOSED): Change(State.TRAINING, Action.MEET),
    (State.TRAINING, Seen.SILENCE): Change(State.SILENT, Action.MEET),
    (State.TRAINING, Seen.ARRIVAL): Change(State.WAITING, Action.AWAIT),
    (State.WAITING, Seen.CHOSEN): Change(State.TRAINING, Action.TRAIN),
    # Its island is not whole, because another member of it has failed.
    (State.WAITING, Seen.LEFT_OUT): Change(State.JOINING, Action.JOIN),
    (State.SILENT, Seen.LEFT_OUT): Change(State.SILENT, Action.EXPEL),
    (State.SILENT, Seen.FINISHED): Change(State.GONE, Action.END),
    (State.SILENT, Seen.ERROR): Change(State.GONE, Action.END_ALL),
    (State.SILENT, Seen.GAVE_UP): Change(State.GONE, Action.REPLACE),
    (State.SILENT, Seen.STOPPED): Change(State.GONE, Action.REPLACE),
    (State.SILENT, Seen.KILLED): Change(State.GONE, Action.REPLACE),
    (State.JOINING, Seen.REQUEST): Change(State.JOINING, Action.ADMIT),
    (State.JOINING, Seen.CHOSEN): Change(State.TRAINING, Action.TRAIN),
    (State.JOINING, Seen.FINISHED): Change(State.GONE, Action.END),
    (State.JOINING, Seen.ERROR): Change(State.GONE, Action.END_ALL),
    (State.JOINING, Seen.GAVE_UP): Change(State.GONE, Action.REPLACE),
    (State.JOINING, Seen.STOPPED): Change(State.GONE, Action.REPLACE),
    (State.JOINING, Seen.KILLED): Change(State.GONE, Action.REPLACE),
}
"""(State of a process, what is seen of it) -> its state then, and what is done.

Three rows are not looked up, because there is one answer to the observation: a closed connection
(`regroup.py` answers), a request to join (`meeting.can_grow`), and the quorum with a process that
joins (`meeting.join`).
"""


def seen_by_launcher(code: int) -> Seen:
    """Translate the exit code of a process; a negative one is the signal that ended it."""
    known = {0: Seen.FINISHED, RANK_FAILURE: Seen.GAVE_UP, INTERRUPTED: Seen.STOPPED}
    return Seen.KILLED if code < 0 else known.get(code, Seen.ERROR)
