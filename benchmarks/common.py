"""What the scripts of this folder share: their parser, their errors, and Markdown tables."""

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence


def script_parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser whose help is the script's description, line by line."""
    return argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )


def run_script(name: str, main: Callable[[], None]) -> None:
    """Run a script, whose errors are one sentence each."""
    try:
        main()
    except ValueError as error:
        print(f"{name}: {error}", file=sys.stderr)
        sys.exit(2)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
