"""adloco train | config | evaluate | generate | report. Bad input ends with one sentence on stderr and exit code 2."""

import argparse
import sys
from collections.abc import Sequence

HELP = """\
commands
  train [RECIPE] [--section.key VALUE ...]   train; RECIPE is a file or a shipped recipe (default: adloco)
  train --resume RUN                         go on with a run from its newest checkpoint
  config [RECIPE] [--section.key VALUE ...]  print the resolved recipe, each setting with its meaning
  evaluate RUN [--data.path PATH]            loss of a run's model on its validation text, or on another text
  generate RUN --prompt TEXT                 continue a text with a run's model
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
    except _user_errors() as error:
        print(f"adloco: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def _user_errors() -> tuple[type[Exception], ...]:
    # ValueError is what the package raises for bad input; NonFiniteLossError only exists once torch is imported.
    worker = sys.modules.get("adloco.algorithms.worker")
    return (ValueError, OSError, *([worker.NonFiniteLossError] if worker else []))


def _dispatch(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="adloco", usage="adloco COMMAND ...", epilog=HELP, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["train", "config", "evaluate", "generate", "report"], metavar="COMMAND", help="see below")
    if not words:
        parser.print_help()
        return 0
    command = parser.parse_args(words[:1]).command
    # Commands import late: torch and transformers take seconds, and a wrong word should not.
    from adloco.cli import commands

    return {
        "train": commands.train,
        "config": commands.config,
        "evaluate": commands.evaluate,
        "generate": commands.generate,
        "report": commands.report,
    }[command](words[1:])
