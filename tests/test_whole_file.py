"""Files that are there whole or as they were before."""

import errno
from pathlib import Path

import pytest

from adloco import whole_file
from adloco.whole_file import write_text


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
