"""Where the chunks of a token store come from: the texts of a source by split, which are read when
the store asks for them, so that a source may be larger than memory.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from adloco.data.data_settings import DataSettings
from adloco.data.encoding import Chunk, Texts
from adloco.data.rows import Position, Stage, open_rows, stages
from adloco.data.token_store import SPLITS, State
from adloco.errors import require

ROWS_AT_ONCE = 256
"""Most rows of a chunk."""
CHARACTERS_AT_ONCE = 1 << 24
"""A chunk ends with the row that reaches so many characters, so that memory is bounded."""


def chunks_after(data: DataSettings, state: State) -> Iterator[Chunk]:
    """The chunks of a source that follow a state of its token store.

    Raises:
        ValueError: The source cannot be read, holds no text, or has a bad row while data.bad_rows
            is "error".
    """
    passes = stages(data)
    position = Position(
        row=state.row,
        files=state.files,
        rows_of_files=state.rows_of_files,
        skipped=Counter(state.skipped),
    )
    before = state.rows - state.row
    for index in range(state.stage, len(passes)):
        texts, characters = _no_texts(), 0
        for number, parts in texts_of(data, passes[index], position):
            for split, part in parts.items():
                texts[split] += part
                characters += sum(map(len, part))
            if (number + 1) % ROWS_AT_ONCE == 0 or characters >= CHARACTERS_AT_ONCE:
                yield _chunk(texts, position, stage=index, rows=before + position.row)
                texts, characters = _no_texts(), 0
        before += position.row
        position = Position(skipped=position.skipped)
        last = index + 1 == len(passes)
        require(
            not last or before > position.skipped.total(),
            f"{data.source} holds no text; "
            + (
                "it must return rows, and the same ones whenever it is called"
                if data.factory
                else "give a text file, a folder of them, or jsonl/parquet with column "
                f"{data.text_column!r}"
            ),
        )
        yield _chunk(texts, position, stage=index + 1, rows=before, complete=last)


def texts_of(data: DataSettings, stage: Stage, position: Position) -> Iterator[tuple[int, Texts]]:
    """(row number, its text by split) of a stage, from a position on; see `open_rows`.

    If there are too few rows to hold out whole ones, the end of each is held out.
    """
    cut = not _holds_out_rows(data, stage)
    for number, row in open_rows(data, stage, {data.text_column: str}, position):
        if row is None:
            yield number, {}
        elif cut:
            text = row[data.text_column]
            at = round(len(text) * (1 - data.validation_fraction))
            yield number, {"train": [text[:at]], "validation": [text[at:]]}
        else:
            yield number, {stage.split_of(number): [row[data.text_column]]}


def _holds_out_rows(data: DataSettings, stage: Stage) -> bool:
    """True if any whole row of a stage is held out. It reads as far as the first one."""
    if data.validation_split or data.validation_samples:
        return True
    rows = open_rows(data, stage, {data.text_column: str}, Position())
    return any(row is not None and stage.split_of(number) == "validation" for number, row in rows)


def _no_texts() -> Texts:
    return {split: [] for split in SPLITS}


def _chunk(texts: Texts, position: Position, **after: Any) -> Chunk:
    # A position's values have the same names in a state.
    return Chunk(texts=texts, after={**vars(position), "skipped": dict(position.skipped), **after})
