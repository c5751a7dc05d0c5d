"""Text to train on: documents from files, or by default the source of Python's own standard library, split into train and validation."""

import json
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from adloco.rules.checks import require

NOT_LIBRARY = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__"}
"""Folders left out of the default corpus: tests differ between distributions, packages between machines."""


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Documents to train on and to validate on."""

    train: tuple[str, ...]
    validation: tuple[str, ...]


def load_corpus(path: str, text_column: str, validation_fraction: float) -> Corpus:
    """The corpus at a path (file, folder, .jsonl or .parquet), or the standard library's source for an empty path."""
    documents = list(_read(Path(path).expanduser(), text_column)) if path else list(_standard_library())
    documents = [document for document in documents if document.strip()]
    require(bool(documents), f"data.path {path!r} holds no text; give a text file, a folder of them, or jsonl/parquet with column {text_column!r}")
    return _split(documents, validation_fraction)


def _split(documents: list[str], validation_fraction: float) -> Corpus:
    """Every k-th document validates; of fewer than k documents, the tail of each."""
    every = round(1 / validation_fraction)
    if len(documents) >= every:
        held_out = {index for index in range(len(documents)) if index % every == every - 1}
        return Corpus(
            train=tuple(document for index, document in enumerate(documents) if index not in held_out),
            validation=tuple(documents[index] for index in sorted(held_out)),
        )
    cuts = [round(len(document) * (1 - validation_fraction)) for document in documents]
    return Corpus(
        train=tuple(document[:cut] for document, cut in zip(documents, cuts, strict=True)),
        validation=tuple(document[cut:] for document, cut in zip(documents, cuts, strict=True)),
    )


def _standard_library() -> Iterator[str]:
    root = Path(sysconfig.get_path("stdlib"))
    seen: set[str] = set()
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        if NOT_LIBRARY.intersection(path.relative_to(root).parts):
            continue
        text = path.read_bytes().decode("utf-8", errors="replace")
        if "\ufffd" not in text and text not in seen:
            seen.add(text)
            yield text


def _read(path: Path, text_column: str) -> Iterator[str]:
    require(path.exists(), f"data.path {str(path)!r} does not exist; give a text file, a folder, or jsonl/parquet")
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    for file in files:
        yield from READERS.get(file.suffix.lower(), _text)(file, text_column)


def _text(file: Path, text_column: str) -> Iterator[str]:
    yield _decode(file)


def _jsonl(file: Path, text_column: str) -> Iterator[str]:
    for number, line in enumerate(_decode(file).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{file} line {number} is not JSON ({error.msg}); mend or remove the line") from error
        columns = list(row) if isinstance(row, dict) else []
        require(text_column in columns, f"{file} line {number} has no column {text_column!r}; set data.text_column to one of {columns}")
        require(isinstance(row[text_column], str), f"{file} line {number}: column {text_column!r} is not text; set data.text_column to one that is")
        yield _encodable(row[text_column], f"{file} line {number}")


def _parquet(file: Path, text_column: str) -> Iterator[str]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError(f"reading {file} needs pyarrow; install it with: pip install 'adloco[parquet]'") from error
    try:
        table = pyarrow.parquet.ParquetFile(file)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{file} is not a readable parquet file ({error}); mend or remove it") from error
    require(
        text_column in table.schema_arrow.names, f"{file} has no column {text_column!r}; set data.text_column to one of {table.schema_arrow.names}"
    )
    for batch in table.iter_batches(columns=[text_column]):
        for value in batch.column(0).to_pylist():
            require(isinstance(value, str), f"{file}: column {text_column!r} holds {type(value).__name__}, not text; set data.text_column to another")
            yield _encodable(value, str(file))


def _encodable(text: str, where: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"{where} holds half a surrogate pair at character {error.start}, which is no text; mend or remove it") from error
    return text


def _decode(file: Path) -> str:
    try:
        return file.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 text (byte {error.start}); convert it, for instance with iconv, or leave it out") from error


READERS: dict[str, Callable[[Path, str], Iterator[str]]] = {".jsonl": _jsonl, ".ndjson": _jsonl, ".parquet": _parquet}
