"""Files that are on disk whole or as they were before, also after a power cut, and checksums."""

import errno
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def write_text(file: Path, text: str) -> None:
    """Write a file atomically, in UTF-8 and with the line ends of the text.

    A symbolic link in the place of the file is replaced, and what it points to stays as it is.
    """
    write_bytes(file, text.encode())


def write_bytes(file: Path, content: bytes) -> None:
    """Write a file atomically; see `write_text`."""
    # "x" follows no link that somebody put in the place of the temporary file.
    with written_whole(file) as temporary, temporary.open("xb") as out:
        out.write(content)
    to_disk(file.parent)


@contextmanager
def written_whole(file: Path) -> Iterator[Path]:
    """Yield a temporary path for a file's content; the file is there when the context has ended.

    Its content is on disk then. Its name is after a `to_disk` of the folder.
    """
    temporary = file.with_name(f".{file.name}")
    try:
        temporary.unlink(missing_ok=True)
        yield temporary
        to_disk(temporary)
        temporary.replace(file)
    except BaseException as error:
        with suppress(OSError):  # The file system may have become read-only.
            temporary.unlink(missing_ok=True)  # Its room may be needed: the disk may be full.
        if isinstance(error, OSError) and error.errno:
            named = str(error.filename or temporary)  # That of a full disk names no file.
            if named == str(temporary):
                error.filename = str(file)  # The name that the user knows.
        raise


def make_folder(folder: Path, *, exist_ok: bool = True) -> None:
    """Make a folder and those above it that are missing. Their names are on disk then."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=exist_ok)
    for each in missing:
        with suppress(PermissionError):  # Who may write in a folder need not be able to read it.
            to_disk(each.parent)


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a disk, or of a quota, that has no room."""


def remedy(error: OSError) -> str:
    """What a person can do about a folder in which a file cannot be written."""
    return {
        errno.ENOENT: "bring that folder back",
        errno.EROFS: "make it writable",
        errno.EACCES: "make it writable",
        errno.EPERM: "make it writable",
        errno.EIO: "look after its disk",
        errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
    }.get(error.errno or 0, "make room there")


def all_to_disk(folder: Path) -> None:
    """Wait until a folder is on disk with all that is in it and below it."""
    for path in (*folder.rglob("*"), folder):
        to_disk(path)


def to_disk(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot do this for a folder.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def checksum(file: Path) -> str:
    """SHA-256 of a file's content, in hexadecimal."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def checksums(folder: Path) -> dict[str, str]:
    """The checksum of each file in a folder and below it, by its path in the folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): checksum(path) for path in files}
