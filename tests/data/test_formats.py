"""Formats of data files."""

from pathlib import Path

from adloco.data.files import data_files


def test_files_are_read_by_their_suffix(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.NDJSON", "c.parquet", "d.txt", "e"):
        (tmp_path / name).write_text("")
    found = data_files(tmp_path, "text")
    assert [file.unit for file in found] == ["line", "line", "row", "", ""]
    assert [Path(file.name).name[0] for file in found] == ["a", "b", "c", "d", "e"]


def test_a_text_keeps_its_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\r\ntwo\n")
    (file,) = data_files(tmp_path / "a.txt", "text")
    assert list(file.read({"text": str}, 0)) == [(1, {"text": "one\r\ntwo\n"})]
    assert list(file.read({"text": str}, 1)) == []
