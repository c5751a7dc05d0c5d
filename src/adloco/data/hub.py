"""Rows of a Hugging Face dataset, by hub id or local folder.

A dataset is always read as a stream: only the requested rows are fetched, whatever its size. The
library `datasets` calls the data files of a dataset its shards. They are read one after another in
their own order, so the number of a row does not depend on where reading began.
"""

import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

from adloco.data.data_file import (
    GONE,
    BadRow,
    Columns,
    DataFile,
    Numbered,
    SourceUnreachableError,
    no_column,
)
from adloco.data.data_settings import DataSettings
from adloco.data.files import expanded
from adloco.errors import require
from adloco.hub_access import hub_asked

DOWNLOAD = "download it and give its folder"


def dataset_files(data: DataSettings, split: str) -> list[DataFile]:
    """The data files of a split.

    Raises:
        SourceUnreachableError: The dataset does not exist or cannot be reached.
        ValueError: It cannot be opened, or has no such configuration or split.
    """
    builder = _builder(data)
    what = data.source
    try:
        streams = builder.as_streaming_dataset()
    except ConnectionError as error:
        raise _unreachable(data, _first_line(error)) from error
    except Exception as error:  # The reader of a broken file can raise anything.
        raise ValueError(
            f"{what} cannot be opened ({_first_line(error)}); mend or remove its first file, from "
            "which the columns of all files are taken"
        ) from error
    require(
        split in streams,
        f"{what} has no split {split!r}; set data.split or data.validation_split to one of "
        f"{', '.join(streams)}",
    )
    stream, files = streams[split], (builder.config.data_files or {}).get(split, [])
    count = stream.num_shards
    names = files if len(files) == count else [f"part {index + 1}" for index in range(count)]
    return [
        dataset_file(
            stream.shard(num_shards=count, index=index), f"{what}: {name}", data.text_column
        )
        for index, name in enumerate(names)
    ]


def named_files(data: DataSettings) -> list[Path]:
    """The files of a local dataset that its card names, which may be in other folders; none if the
    dataset cannot be opened, which a prepared text need not be.
    """
    card = expanded(data.dataset) / "README.md"
    if not (card.is_file() and b"configs" in card.read_bytes()):
        return []
    try:
        named = (_builder(data).config.data_files or {}).values()
    except ValueError:  # Whoever reads the rows is told.
        return []
    return [file for names in named for name in names if (file := Path(name)).is_file()]


def dataset_file(stream: Any, name: str, text_column: str) -> DataFile:
    """A file of a dataset, or one of its parts if these are not files.

    Args:
        stream: What `datasets` reads it with.
        name: Its name, for messages.
    """

    def read(columns: Columns, start: int) -> Numbered:
        import pyarrow
        from huggingface_hub.errors import HfHubHTTPError

        number = start

        def unreachable(error: Exception) -> SourceUnreachableError:
            return SourceUnreachableError(
                f"{name} cannot be reached from row {number + 1} on ({_first_line(error)}); "
                "try again when it can be reached"
            )

        present = stream.column_names or list(columns)
        missing = [column for column in columns if column not in present]
        if missing:
            # The column is missing from every row, so data.bad_rows "skip" would not help.
            bad = no_column(missing[0], present, text_column)
            raise ValueError(f"{name}{bad.problem}; {bad.advice}")
        try:
            for row in stream.select_columns(list(columns)).skip(start):
                number += 1
                yield number, row
        except (ConnectionError, TimeoutError, HfHubHTTPError) as error:
            raise unreachable(error) from error
        except FileNotFoundError:
            yield number + 1, replace(GONE, problem=f" is gone, from row {number + 1} on")
        except Exception as error:
            broken = isinstance(error, (EOFError, zlib.error, ValueError, pyarrow.ArrowException))
            # Decoders of damaged data raise OSError without an errno. Any other error may be
            # temporary, so no rows are left out because of it.
            if not broken and not (isinstance(error, OSError) and error.errno is None):
                raise unreachable(error) from error
            problem = f" cannot be read from row {number + 1} on ({_first_line(error)})"
            advice = "mend or fetch the file again"
            bad = BadRow(reason="unreadable file", problem=problem, advice=advice, rest=True)
            yield number + 1, bad

    return DataFile(name=name, read=read)


def _builder(data: DataSettings) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            f"{data.source} needs the library datasets; install it with: pip "
            "install 'adloco[datasets]'"
        ) from error
    path = expanded(data.dataset)
    local = path.is_dir()
    name = str(path) if local else data.dataset
    what = data.source
    if not local and data.dataset.startswith((".", "/", "~")):
        raise SourceUnreachableError(f"{what} does not exist; {DOWNLOAD}")
    silent = ""
    try:
        with hub_asked(name) as silent:
            return datasets.load_dataset_builder(name, data.config or None)
    except (datasets.exceptions.DatasetNotFoundError, ConnectionError) as error:
        raise _unreachable(data, silent or _first_line(error)) from error
    except (datasets.exceptions.DatasetsError, FileNotFoundError) as error:
        raise ValueError(
            f"{what} holds no data files that can be read ({_first_line(error)}); give one with "
            "json, parquet, csv or text"
        ) from error
    except (ValueError, RuntimeError) as error:
        raise ValueError(
            f"{what} cannot be opened with data.config {data.config!r} ({_first_line(error)}); "
            "set data.config to one of its configurations, mend it or use another"
        ) from error
    except Exception as error:  # Several network libraries, each with its own errors.
        raise _unreachable(data, _first_line(error)) from error


def _unreachable(data: DataSettings, reason: str) -> SourceUnreachableError:
    return SourceUnreachableError(f"{data.source} cannot be reached ({reason}); {DOWNLOAD}")


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0].rstrip(".") if text else type(error).__name__
