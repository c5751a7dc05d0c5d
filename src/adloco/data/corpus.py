"""Text that fits in memory: the documents of a path, or by default the source of Python's standard
library, split into train and validation.
"""

from collections import Counter
from dataclasses import dataclass, field

from adloco.data.data_settings import DataSettings
from adloco.data.rows import Position, open_rows, spread_over_rows, stages
from adloco.errors import require


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Documents to train on and to validate on."""

    train: tuple[str, ...]
    validation: tuple[str, ...]
    skipped: Counter[str] = field(default_factory=Counter)
    """Rows that were left out, by reason."""


def load_corpus(data: DataSettings) -> Corpus:
    """Read the documents of `data.path`, or the default corpus if the path is empty.

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
    if data.validation_samples:
        train = tuple(text for number, text in kept if stage.split_of(number) == "train")
        validation = tuple(text for number, text in kept if stage.split_of(number) == "validation")
    else:
        train, validation = _split([text for _, text in kept], data.validation_fraction)
    return Corpus(train=train, validation=validation, skipped=rows.position.skipped)


def _split(
    documents: list[str], validation_fraction: float
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Hold out whole documents; if they are too few for that, the end of each."""
    held_out = list(map(spread_over_rows(validation_fraction), range(len(documents))))
    if any(held_out):
        pairs = list(zip(documents, held_out, strict=True))
        return tuple(document for document, held in pairs if not held), tuple(
            document for document, held in pairs if held
        )
    cuts = [round(len(document) * (1 - validation_fraction)) for document in documents]
    parts = list(zip(documents, cuts, strict=True))
    return tuple(document[:cut] for document, cut in parts), tuple(
        document[cut:] for document, cut in parts
    )
