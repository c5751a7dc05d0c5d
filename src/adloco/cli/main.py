"""adloco train | prepare | probe | config | evaluate | generate | export | report. Bad input ends
with one sentence on stderr and exit code 2.
"""

import atexit
import difflib
import gc
import os
import sys
from collections.abc import Sequence
from importlib import metadata

from adloco.errors import NonFiniteLossError, OtherRankError, OutOfMemoryError

COMMANDS = ("train", "prepare", "probe", "config", "evaluate", "generate", "export", "report")
HELP = """\
adloco COMMAND ...

  train [RECIPE] [--section.key VALUE ...]   train; RECIPE is a file or a shipped recipe (default: adloco)
  train [RECIPE] --ranks N ...               the same on N processes of this machine
  train --resume RUN [--ranks N]             go on with a run from its newest checkpoint
  prepare [RECIPE] [--section.key VALUE ...] tokenise the recipe's text ahead of time
  probe [RECIPE] [--ranks N] ...             measure the largest micro-batch that fits in memory
  config [RECIPE] [--section.key VALUE ...]  print the resolved recipe, each setting with its meaning
  evaluate RUN [--data.path PATH]            loss of a run's model on its validation text, or on another text
  generate RUN --prompt TEXT                 continue a text with a run's model
  export RUN --to FOLDER                     write the model for transformers, with tokenizer and model card
  report RUN                                 draw the plots and the report of a run again

Settings used often: --run.tokens (the budget), --run.folder, --run.seed, --data.path, --data.tokenizer. All of them: adloco config.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _dispatch(words)
    except BrokenPipeError:
        # The reader of our output went away, as in `adloco config | head`.
        sys.stderr.close()
        return 0
    except KeyboardInterrupt:
        print("adloco: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if not _is_for_users(error):
            raise
        rank = os.environ.get("RANK", "0")
        name = "adloco" if rank == "0" else f"adloco (rank {rank})"
        print(f"{name}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def _is_for_users(error: Exception) -> bool:
    """Whether the message is all that a user needs."""
    memory = sys.modules.get("adloco.distributed.device_memory")
    return isinstance(error, _user_errors()) or (
        memory is not None and isinstance(error, RuntimeError) and memory.ran_out_of_memory(error)
    )


def _user_errors() -> tuple[type[Exception], ...]:
    # torch's own is there only once torch is imported.
    torch = sys.modules.get("torch")
    ours = (ValueError, OSError, NonFiniteLossError, OutOfMemoryError, OtherRankError)
    return (*ours, torch.OutOfMemoryError) if torch else ours


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(HELP, end="")
        return 0
    if words[0] == "--version":
        print(f"adloco {metadata.version('adloco')}")
        return 0
    if words[0] not in COMMANDS:
        nearest = difflib.get_close_matches(words[0], COMMANDS, n=1)
        suggestion = f" (did you mean {nearest[0]!r}?)" if nearest else ""
        raise ValueError(
            f"there is no command {words[0]!r}{suggestion}; commands are {', '.join(COMMANDS)}"
        )
    # At its end Python would look for over a second for garbage among all that torch and
    # transformers have made.
    atexit.register(gc.freeze)
    # Commands import late: transformers takes seconds, and a wrong word should not.
    from adloco.cli import commands, prepare, probe

    return {
        "train": commands.train,
        "prepare": prepare.prepare,
        "probe": probe.probe,
        "config": commands.config,
        "evaluate": commands.evaluate,
        "generate": commands.generate,
        "export": commands.export,
        "report": commands.report,
    }[words[0]](words[1:])
