"""Any data file is read, left out by rows, or refused in one sentence: no other exception."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
from hypothesis import strategies as st

from adloco.data.data_settings import DataSettings
from tests.data.reading import SplitRows, read_all
from tests.fuzzing import BITS, cheap_and, flip, fuzz

PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([2**63, 10**400, -1, 70_000]),
    st.floats(),
    st.text(st.characters(exclude_categories=()), max_size=8),  # Half surrogate pairs too.
)
JSON = st.recursive(
    PLAIN,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=4,
)
ROWS = st.fixed_dictionaries({}, optional={"text": JSON, "label": JSON})
LINES = st.one_of(
    ROWS.map(json.dumps).map(str.encode),
    JSON.map(json.dumps).map(str.encode),
    st.binary(max_size=12).map(lambda line: line.replace(b"\n", b"")),
    st.sampled_from([b"[" * 5000, b'{"text": ' + b"9" * 5000 + b"}", b'{"text": "\xff"}', b""]),
)
COLUMNS: dict[str, tuple[Any, st.SearchStrategy[Any]]] = {
    "string": (pyarrow.string(), st.text(max_size=8)),
    "bytes": (pyarrow.binary(), st.binary(max_size=8)),
    "int64": (pyarrow.int64(), st.integers(-(2**63), 2**63 - 1)),
    "float": (pyarrow.float64(), st.floats()),
    "list": (pyarrow.list_(pyarrow.int64()), st.lists(st.integers(0, 9), max_size=2)),
    "dictionary": (pyarrow.dictionary(pyarrow.int32(), pyarrow.string()), st.text(max_size=3)),
    "time": (pyarrow.timestamp("ns"), st.integers(-(2**63), 2**63 - 1)),
    "date": (pyarrow.date64(), st.integers(-(2**62), 2**62)),
    "decimal": (pyarrow.decimal128(9, 2), st.decimals(0, 9, places=2)),
}


def read_or_refused(file: Path) -> tuple[int, int] | None:
    """Rows that are taken and left out with data.bad_rows skip; None if all is refused."""
    found = []
    for bad_rows in ("error", "skip"):
        data = DataSettings(path=str(file), bad_rows=bad_rows)
        try:
            corpus = read_all(data)
            texts = len(corpus.train) + len(corpus.validation)
            found.append((texts, sum(corpus.skipped.values())))
        except ValueError as error:
            assert 0 < len(str(error)) < 3000 + len(str(file))
            if bad_rows == "skip":
                assert "holds no text" in str(error)
        labelled = SplitRows(data, "train", {"text": str, "label": int})
        try:
            assert all(type(row["text"]) is str and row["label"] >= 0 for row in labelled)
        except ValueError as error:
            assert bad_rows == "error", error
    return found[-1] if found else None


@cheap_and(many=3000, cheap=60)
def test_lines_of_jsonl(examples: int, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"

    def check(lines: list[bytes]) -> None:
        file.write_bytes(b"\n".join(lines))
        read_or_refused(file)

    fuzz(examples, check, lines=st.lists(LINES, max_size=6))


@cheap_and(many=3000, cheap=60)
def test_bytes_of_text(examples: int, tmp_path: Path) -> None:
    file = tmp_path / "text.txt"

    def check(content: bytes) -> None:
        file.write_bytes(content)
        read_or_refused(file)

    fuzz(examples, check, content=st.binary(max_size=64) | st.text().map(str.encode))


def columns() -> st.SearchStrategy[tuple[str, list[Any]]]:
    """The kind of a column, and values of it."""
    return st.sampled_from(sorted(COLUMNS)).flatmap(
        lambda kind: st.tuples(
            st.just(kind), st.lists(st.none() | COLUMNS[kind][1], min_size=3, max_size=3)
        )
    )


@cheap_and(many=3000, cheap=60)
def test_columns_of_parquet(examples: int, tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"

    def check(table: dict[str, tuple[str, list[Any]]]) -> None:
        arrays = {
            name: pyarrow.array(values, COLUMNS[kind][0]) for name, (kind, values) in table.items()
        }
        pyarrow.parquet.write_table(pyarrow.table(arrays), file)
        read_or_refused(file)

    named = st.fixed_dictionaries({"text": columns()}, optional={"label": columns()})
    fuzz(examples, check, table=named)


@cheap_and(many=3000, cheap=60)
def test_parquet_with_flipped_bits(examples: int, tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    table = {"text": [f"row {number} é" for number in range(50)], "label": [*range(50)]}
    pyarrow.parquet.write_table(pyarrow.table(table), file)
    whole = file.read_bytes()

    def check(bits: list[int], end: int) -> None:
        file.write_bytes(flip(whole, bits)[: len(whole) - end])
        read_or_refused(file)

    fuzz(examples, check, bits=BITS, end=st.just(0) | st.integers(0, len(whole)))
