"""Where the chunks of a token store come from: a corpus in memory, or the rows of a dataset, which
are read when the store asks for them.

A corpus is the documents of a path, of a function, or by default the source of Python's standard
library, split into train and validation.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from adloco.data.data_settings import DataSettings
from adloco.data.encoding import Chunk, Texts
from adloco.data.rows import Position, Split, open_rows, spread_over_rows, stages
from adloco.data.token_store import SPLITS, State
from adloco.errors import require

ROWS_AT_ONCE = 256
"""Rows of a chunk."""


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Documents to train on and to validate on."""

    train: tuple[str, ...]
    validation: tuple[str, ...]
    documents: int
    """Number of texts that were read. If they are few, the end of each is held out, so that a text
    is in both."""
    skipped: Counter[str] = field(default_factory=Counter)
    """Rows that were left out, by reason."""

    def chunks(self, state: State) -> Iterator[Chunk]:
        """The chunks that follow a state: the documents to train on, then those to validate on."""
        documents: list[tuple[Split, str]] = [("train", text) for text in self.train]
        documents += [("validation", text) for text in self.validation]
        for start in range(state.row, len(documents), ROWS_AT_ONCE):
            part = documents[start : start + ROWS_AT_ONCE]
            end = start + len(part)
            yield Chunk(
                texts={split: [text for to, text in part if to == split] for split in SPLITS},
                after={
                    "row": end,
                    "rows": self.documents + self.skipped.total(),
                    "documents": self.documents,
                    "skipped": dict(self.skipped),
                    "complete": end == len(documents),
                },
            )


def load_corpus(data: DataSettings) -> Corpus:
    """Read the documents of a source that is no dataset.

    Raises:
        ValueError: The path does not exist, contains no text, or contains a bad row while
            data.bad_rows is "error".
    """
    (stage,) = stages(data)
    rows = open_rows(data, stage, {data.text_column: str}, Position())
    kept = [(number, row[data.text_column]) for number, row in rows if row is not None]
    column = f"jsonl/parquet with column {data.text_column!r}"
    require(
        bool(kept), f"{data.source} holds no text; give a text file, a folder of them, or {column}"
    )
    texts: Texts = {split: [] for split in SPLITS}
    held_out = spread_over_rows(data.validation_fraction)
    if data.validation_samples:
        for number, text in kept:
            texts[stage.split_of(number)].append(text)
    elif any(map(held_out, range(len(kept)))):
        for index, (_, text) in enumerate(kept):
            texts["validation" if held_out(index) else "train"].append(text)
    else:  # Too few documents to hold out whole ones: the end of each.
        for _, text in kept:
            cut = round(len(text) * (1 - data.validation_fraction))
            texts["train"].append(text[:cut])
            texts["validation"].append(text[cut:])
    return Corpus(
        train=tuple(texts["train"]),
        validation=tuple(texts["validation"]),
        documents=len(kept),
        skipped=rows.position.skipped,
    )


def dataset_chunks(data: DataSettings, state: State) -> Iterator[Chunk]:
    """The chunks of a dataset that follow a state."""
    passes = stages(data)
    position = Position(
        row=state.row, file_rows=list(state.file_rows), skipped=Counter(state.skipped)
    )
    before = state.rows - state.row
    for index in range(state.stage, len(passes)):
        texts: Texts = {split: [] for split in SPLITS}
        for number, row in open_rows(data, passes[index], {data.text_column: str}, position):
            if row is not None:
                texts[passes[index].split_of(number)].append(row[data.text_column])
            if (number + 1) % ROWS_AT_ONCE == 0:
                yield _chunk(texts, position, stage=index, rows=before + position.row)
                texts = {split: [] for split in SPLITS}
        before += position.row
        position = Position(skipped=position.skipped)
        last = index + 1 == len(passes)
        yield _chunk(texts, position, stage=index + 1, rows=before, complete=last)


def _chunk(texts: Texts, position: Position, **after: Any) -> Chunk:
    return Chunk(
        texts=texts,
        after={
            "row": position.row,
            "file_rows": list(position.file_rows),
            "skipped": dict(position.skipped),
            **after,
        },
    )
