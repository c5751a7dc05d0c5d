"""A digest that changes when a source may have changed, if possible without reading it."""

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from adloco.data.data_settings import DataSettings
from adloco.data.files import LIBRARY, expanded, files_at, library_files
from adloco.data.hub import named_files
from adloco.data.rows import Position, open_rows, stages


def source_digest(data: DataSettings) -> str:
    """From the paths, sizes and times of the source's files; of a function, from its rows, which
    are all read; empty for a dataset on the hub.
    """
    if data.dataset:
        root = expanded(data.dataset)
        if not root.is_dir():
            return ""
        return _files_digest(root, [*filter(Path.is_file, root.rglob("*")), *named_files(data)])
    if data.factory:
        digest = hashlib.sha256()
        (stage,) = stages(data)
        for number, row in open_rows(data, stage, {data.text_column: str}, Position()):
            text = "" if row is None else row[data.text_column]
            digest.update(f"{number} {len(text)} {text}".encode())
        return digest.hexdigest()
    if data.path:
        path = expanded(data.path)
        return _files_digest(path, files_at(path))
    return _files_digest(LIBRARY, library_files())


def _files_digest(root: Path, files: Iterable[Path]) -> str:
    """Digest of the names, sizes and times of files, and of the path from which they are named: two
    texts can be equal in all the others, where times were set to one value.
    """
    named = {Path(os.path.relpath(file, root)): file for file in files}  # Some have two paths.
    stats = [
        (name.as_posix(), file.stat() if file.exists() else None)
        for name, file in sorted(named.items())
    ]
    facts = [(name, stat and (stat.st_size, stat.st_mtime_ns)) for name, stat in stats]
    return hashlib.sha256(repr([str(root.resolve()), *facts]).encode()).hexdigest()
