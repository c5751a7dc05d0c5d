"""Files are there whole or as they were, follow no links, and have the modes of the umask."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from adloco import whole_file
from adloco.run.part_file import write_part
from adloco.whole_file import remedy, write_text


def test_a_file_is_on_disk_before_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, contents = tmp_path / "a", {}
    file.write_text("before")
    monkeypatch.setattr(
        whole_file, "to_disk", lambda path: contents.update({path.name: file.read_text()})
    )
    write_text(file, "after")
    assert contents == {".a": "before", tmp_path.name: "after"}


def test_a_full_disk_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_text("before")

    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(whole_file, "to_disk", full)
    with pytest.raises(OSError, match="No space left"):
        write_text(tmp_path / "a", "after")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_text() == "before"


def test_an_error_names_the_file_and_not_its_temporary_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(path: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system", path)

    monkeypatch.setattr(whole_file, "to_disk", read_only)
    with pytest.raises(OSError, match="Read-only") as caught:
        write_text(tmp_path / "report.html", "page")
    assert caught.value.filename == str(tmp_path / "report.html")
    assert remedy(caught.value) == "make it writable"
    assert remedy(OSError(errno.EIO, "Input/output error")) == "look after its disk"


@pytest.fixture
def private() -> Iterator[None]:
    """The umask of a user who shares nothing."""
    before = os.umask(0o077)
    yield
    os.umask(before)


@pytest.mark.parametrize("link", ["page.html", ".page.html"])
def test_the_target_of_a_link_is_left_as_it_is(link: str, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("precious")
    (tmp_path / link).symlink_to(target)
    write_text(tmp_path / "page.html", "new")
    assert (tmp_path / "page.html").read_text() == "new"
    assert not (tmp_path / "page.html").is_symlink()
    assert target.read_text() == "precious"
    assert {file.name for file in tmp_path.iterdir()} == {"page.html", "target"}


def test_files_and_checkpoints_of_a_private_user_are_private(private: None, tmp_path: Path) -> None:
    write_text(tmp_path / "page.html", "new")
    write_part(tmp_path, "run", {"number": 1})
    files = list(tmp_path.iterdir())
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}
    assert len(files) == 4
