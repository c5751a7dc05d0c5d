"""Text of `adloco prepare --check`: rows as they are read, counts of tokens, and samples."""

from collections.abc import Iterable, Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from adloco.cli.progress import shown_progress
from adloco.cli.terminal import table_of
from adloco.data.data_file import SourceUnreachableError
from adloco.data.data_settings import DataSettings
from adloco.data.labelled_texts import read_texts
from adloco.data.repeated import LENGTH, repeated_share
from adloco.data.rows import Position, open_rows, stages
from adloco.data.sources import TokenSource
from adloco.data.token_cache import TokenCache
from adloco.data.tokenizers import Tokenizer, make_tokenizer
from adloco.tasks.kinds.classification_settings import ClassificationSettings

SHOWN_TEXTS = 3
SHOWN_CHARACTERS = 240
SHOWN_LABELS = 20
BLOCK = 2**20
"""Tokens that are counted at a time."""


def check_packed(cache: TokenCache, console: Console) -> None:
    """Show the data of a language model, whose tokens are all in the cache."""
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

    table = _counts_table(tokenizer)
    for split, tokens in (("train", cache.train), ("validation", cache.validation)):
        ends, unknown = [np.array([-1])], 0
        with shown_progress(console, f"counting {split} tokens") as advance:
            for start in range(0, len(tokens), BLOCK):
                block = tokens[start : start + BLOCK]
                ends.append(start + np.flatnonzero(block == tokenizer.end_of_text))
                unknown += int(np.count_nonzero(block == tokenizer.unknown))
                advance(len(block), len(tokens))
        lengths = np.diff(np.concatenate(ends)) - 1
        _add_counts(table, split, lengths, len(tokens), unknown)
    console.print(table)

    with shown_progress(console, "looking for held-out text in the text to train on") as advance:
        total = len(cache.train)
        share = repeated_share(cache.validation, cache.train, lambda more: advance(more, total))
    if share is not None:
        _say(
            f"at {share:.1%} of the places in the text that is held out, the next {LENGTH} tokens "
            "stand in the text to train on, too: there a loss says how well they are remembered",
            console,
        )

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


def check_labelled(data: DataSettings, task: ClassificationSettings, console: Console) -> None:
    """Show the data of a classifier: labelled texts, which are not packed."""
    label, column = task.label_column, data.text_column
    stage = stages(data)[-1]
    rows = open_rows(data, stage, {column: str, label: int}, Position())
    _show(
        f"rows of {data.source} as they are read, with their labels",
        (
            f"{row[label]}: {row[column]}"
            for number, row in rows
            if row is not None and stage.split_of(number) == "train"
        ),
        console,
    )
    _say("reading and tokenising all texts ...", console)
    tokenizer = make_tokenizer(data.tokenizer, ())
    found, _ = read_texts(data, label, tokenizer)
    train, validation = found["train"], found["validation"]
    table = _counts_table(tokenizer)
    for split, texts in (("train", train), ("validation", validation)):
        unknown = int(np.count_nonzero(texts.ids == tokenizer.unknown))
        _add_counts(table, split, np.diff(texts.starts), len(texts.ids), unknown)
    console.print(table)
    _show(
        f"of {len(train):,} samples to train on, at most {data.context_tokens} tokens",
        (
            tokenizer.decode(train.ids[begin:end].tolist())
            for begin, end in zip(train.starts, train.starts[1:], strict=False)
        ),
        console,
    )
    known = {text.tobytes() for text in np.split(train.ids, train.starts[1:-1])}
    held_out = np.split(validation.ids, validation.starts[1:-1])
    repeated = sum(text.tobytes() in known for text in held_out)
    _say(
        f"{repeated:,} of the {len(validation):,} texts that are held out are among those to train "
        "on, too, by the tokens that a model sees",
        console,
    )
    evaluated = validation.balanced(task.evaluation_per_class, train.num_classes)
    counts = np.bincount(validation.labels[evaluated], minlength=train.num_classes)
    cut = np.count_nonzero(np.diff(train.starts) == data.context_tokens)
    _say(
        f"{cut:,} texts to train on have {data.context_tokens} tokens, so they may be cut "
        f"(data.context_tokens); labels to train on: {_each(np.bincount(train.labels))}; to "
        f"evaluate on: {_each(counts)}, so always the most frequent one is right for "
        f"{counts.max() / counts.sum():.1%}",
        console,
    )


def _counts_table(tokenizer: Tokenizer) -> Table:
    unknown = [] if tokenizer.unknown is None else ["unknown"]
    columns = ("tokens", "in all", "texts", "shortest", "median", "longest", *unknown)
    return table_of(*columns, names=1)


def _add_counts(
    table: Table, split: str, lengths: NDArray[np.int64], tokens: int, unknown: int
) -> None:
    """Add the counts of a split's texts, which have these lengths in tokens."""
    cells = [split, f"{tokens:,}", f"{len(lengths):,}"]
    if len(lengths):
        cells += [f"{lengths.min():,}", f"{np.median(lengths):,.1f}", f"{lengths.max():,}"]
        cells += [f"{unknown / tokens:.3%}"]
    table.add_row(*cells[: len(table.columns)])


def _each(counts: Sequence[int] | NDArray[np.int64]) -> str:
    shown = ", ".join(f"{count:,} x {label}" for label, count in enumerate(counts[:SHOWN_LABELS]))
    more = len(counts) - SHOWN_LABELS
    return f"{shown} and {more:,} labels more" if more > 0 else shown


def _show(heading: str, texts: Iterable[str], console: Console) -> None:
    """Print the first texts, a line each, in Python's notation: no character is hidden."""
    console.print(heading, style="bold", soft_wrap=True)
    for text in islice(texts, SHOWN_TEXTS):
        more = len(text) - SHOWN_CHARACTERS
        rest = f" and {more:,} characters more" if more > 0 else ""
        _say(f"  {text[:SHOWN_CHARACTERS]!r}{rest}", console)


def _say(sentence: str, console: Console) -> None:
    console.print(sentence, soft_wrap=True)
