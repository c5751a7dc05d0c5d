"""What the scripts of this folder share: their parser, and Markdown tables."""

import argparse
from collections.abc import Iterable, Sequence


def script_parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser whose help is the script's description, line by line."""
    return argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
