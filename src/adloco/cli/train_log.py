"""Writes train.log, the plain text of what `adloco train` says: a date and a time on every line.

What any module logs below "adloco" while a run trains is appended to the file in the run's folder.
"""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from adloco.cli.terminal import printable
from adloco.run.folder import LOG
from adloco.run.training_run import TrainingRun

LINE = "%(asctime)s %(levelname)-7s %(message)s"
DATE = "%Y-%m-%d %H:%M:%S"


@contextmanager
def train_log(run: TrainingRun) -> Iterator[logging.Logger]:
    """Append to train.log while the context lasts, on rank 0; other ranks log nothing.

    An error that leaves the context is logged too.
    """
    logger = logging.getLogger("adloco")
    here = run.placement.is_rank_zero
    handler = _LogFile(run.folder / LOG, encoding="utf-8") if here else logging.NullHandler()
    handler.setFormatter(_OneLine(LINE, DATE))
    level, propagates = logger.level, logger.propagate
    # The handlers of a program around this one could write over the live view.
    logger.propagate = False
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield logger
    except KeyboardInterrupt:
        logger.error("interrupted; what was trained since the newest checkpoint is lost")
        raise
    except Exception as error:
        logger.error("%s: %s", type(error).__name__, error)
        raise
    finally:
        logger.removeHandler(handler)
        handler.close()
        logger.setLevel(level)
        logger.propagate = propagates


class _LogFile(logging.FileHandler):
    """A file that may lack lines while its disk is full; a run does not end for that."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)

    def close(self) -> None:
        with suppress(OSError):
            super().close()


class _OneLine(logging.Formatter):
    """One line for each message, without escapes and other control characters."""

    def format(self, record: logging.LogRecord) -> str:
        return " ".join(printable(super().format(record)).splitlines()).rstrip()
