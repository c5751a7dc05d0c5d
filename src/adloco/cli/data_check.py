"""Text of `adloco prepare --check` about a recipe's data: rows as they are read, counts of tokens,
and samples as the model sees them.
"""

from collections.abc import Iterable
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console

from adloco.cli.progress import shown_progress
from adloco.cli.terminal import table_of
from adloco.data.text_lengths import TextLengths

if TYPE_CHECKING:
    from adloco.data.token_cache import TokenCache

SHOWN_TEXTS = 3
SHOWN_CHARACTERS = 240
BLOCK = 2**20
"""Tokens that are counted at a time."""


def check(cache: "TokenCache", console: Console) -> None:
    """Show the data of a language model, whose tokens are all in the cache."""
    from adloco.data.data_file import SourceUnreachableError
    from adloco.data.rows import Position, open_rows, stages
    from adloco.data.sources import TokenSource

    data, tokenizer = cache.data, cache.tokenizer
    try:
        rows = open_rows(data, stages(data)[-1], {data.text_column: str}, Position())
        _show(
            f"rows of {data.source} as they are read",
            (row[data.text_column] for _, row in rows if row is not None),
            console,
        )
    except SourceUnreachableError as error:  # The cache was prepared earlier.
        _say(f"rows as they are read: {error}", console)

    unknown_too = [] if tokenizer.unknown is None else ["unknown"]
    columns = ("tokens", "in all", "texts", "shortest", "median", "longest", *unknown_too)
    table = table_of(*columns, names=1)
    for split, tokens in (("train", cache.train), ("validation", cache.validation)):
        lengths, unknown = TextLengths(), 0
        with shown_progress(console, f"counting {split} tokens") as advance:
            for start in range(0, len(tokens), BLOCK):
                block = tokens[start : start + BLOCK]
                lengths.add_packed(block, tokenizer.end_of_text)
                unknown += int(np.count_nonzero(block == tokenizer.unknown))
                advance(len(block), len(tokens))
        cells = [split, f"{len(tokens):,}", f"{lengths.texts:,}"]
        if lengths.texts:
            cells += [f"{lengths.shortest:,}", f"{lengths.median:,.1f}", f"{lengths.longest:,}"]
            cells += [f"{unknown / len(tokens):.3%}"]
        table.add_row(*cells[: len(columns)])
    console.print(table)

    if len(cache.train) > data.context_tokens:
        windows = TokenSource(cache.train, context_tokens=data.context_tokens)
        shown = np.linspace(0, windows.num_windows - 1, min(SHOWN_TEXTS, windows.num_windows))
        _show(
            f"of {windows.num_windows:,} samples to train on: {data.context_tokens} tokens, and "
            "the one to predict last",
            (tokenizer.decode(ids) for ids in windows.windows(shown.astype(np.int64)).tolist()),
            console,
        )
    else:
        _say(f"too short for one sample of {data.context_tokens} tokens to train on", console)


def _show(heading: str, texts: Iterable[str], console: Console) -> None:
    """Print the first texts, a line each, in Python's notation: no character is hidden."""
    console.print(heading, style="bold", soft_wrap=True)
    for text in islice(texts, SHOWN_TEXTS):
        more = len(text) - SHOWN_CHARACTERS
        rest = f" and {more:,} characters more" if more > 0 else ""
        _say(f"  {text[:SHOWN_CHARACTERS]!r}{rest}", console)


def _say(sentence: str, console: Console) -> None:
    console.print(sentence, soft_wrap=True)
