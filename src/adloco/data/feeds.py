"""Feeds of a token store: the chunks of a corpus in memory, or of a dataset's rows, which are read
when the store asks for them.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from adloco.data.corpus import Corpus
from adloco.data.data_settings import DataSettings
from adloco.data.encoding import Chunk, Texts
from adloco.data.rows import Position, Split, open_rows, stages
from adloco.data.token_store import SPLITS, Feed, State

ROWS_AT_ONCE = 256
"""Rows of a chunk."""


def corpus_feed(corpus: Corpus) -> Feed:
    """Chunks of a corpus in memory: the documents to train on, then those to validate on."""

    def feed(state: State) -> Iterator[Chunk]:
        documents: list[tuple[Split, str]] = [("train", text) for text in corpus.train] + [
            ("validation", text) for text in corpus.validation
        ]
        for start in range(state.row, len(documents), ROWS_AT_ONCE):
            part = documents[start : start + ROWS_AT_ONCE]
            end = start + len(part)
            texts: Texts = {split: [text for to, text in part if to == split] for split in SPLITS}
            yield Chunk(
                texts=texts,
                after={
                    "row": end,
                    "rows": end,
                    "skipped": dict(corpus.skipped),
                    "complete": end == len(documents),
                },
            )

    return feed


def dataset_feed(data: DataSettings) -> Feed:
    """Chunks of a dataset's rows, which are read as the store asks for them."""

    def feed(state: State) -> Iterator[Chunk]:
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

    return feed


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
