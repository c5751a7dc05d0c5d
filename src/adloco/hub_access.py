"""The Hugging Face hub, asked whether it answers before anything is wanted from it.

Without a network its clients try each file five times with pauses, which takes a minute, also for
files that were downloaded before.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ANSWER_SECONDS = 5.0
NOT_THERE = "and it was not downloaded before"
SILENT = f"the Hugging Face hub does not answer, {NOT_THERE}"
OFFLINE = f"HF_HUB_OFFLINE is set, {NOT_THERE}"


@contextmanager
def hub_asked(name: str) -> Iterator[str]:
    """Let clients of the hub take only what was downloaded before, if the hub does not answer.

    name: What is wanted: a name at the hub, or a folder, for which the hub is not asked.

    Yields:
        `SILENT` or `OFFLINE` if it does not answer or is not to be asked, for the message about a
        failure inside; else an empty text.
    """
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    at_hub = not Path(name).exists()
    silent = not before and at_hub and not _answers()
    try:
        constants.HF_HUB_OFFLINE = before or silent
        yield SILENT if silent else OFFLINE if before and at_hub else ""
    finally:
        constants.HF_HUB_OFFLINE = before


def _answers() -> bool:
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=ANSWER_SECONDS)
    except Exception:  # Those of the network library, which depends on the hub's version.
        return False
    return True
