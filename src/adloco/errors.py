"""The errors that users see, each with one sentence that says what to change."""


def require(condition: bool, message: str) -> None:
    """Raise ValueError(message) unless the condition is true.

    The message says what was wrong, the value received, what is allowed and what to change.
    """
    if not condition:
        raise ValueError(message)


class NonFiniteLossError(RuntimeError):
    """A loss or a worker's parameters became nan or infinite.

    The trainers' global parameters still have the values of the last sync.
    """


class OutOfMemoryError(RuntimeError):
    """Memory ran out in a step that could not be repeated with smaller micro-batches.

    Attributes:
        pass_limit: The largest micro-batch to try next, in samples; 0 if none is left.
    """

    def __init__(self, message: str, pass_limit: int = 0) -> None:
        super().__init__(message)
        self.pass_limit = pass_limit


class OtherRankError(RuntimeError):
    """Another rank of the run failed; the message is that rank's."""


class LostRankError(OtherRankError):
    """Another rank was killed, is stopped or cannot be reached; a resumed run may succeed."""


LOST = 1
"""Exit code of a command that ends because a rank was lost."""


def exit_code(error: Exception) -> int:
    """The exit code of a command that ends so: `LOST`, or 2 for what a user can mend."""
    return LOST if isinstance(error, LostRankError) else 2


class RunWarning(UserWarning):
    """Something beside a run's training failed, and the run goes on without it."""
