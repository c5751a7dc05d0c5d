"""Reading the records of a run."""

import json
from pathlib import Path

from adloco.run.records import TAIL_BYTES, Records


def test_the_newest_line_is_found_from_the_end(tmp_path: Path) -> None:
    file, records = tmp_path / "metrics.jsonl", Records(tmp_path)
    assert records.newest() == {}
    file.write_text('{"round": 1')
    assert records.newest() == {}, "a line that was cut off does not count"
    file.write_text('{"round": 1}\n')
    assert records.newest() == {"round": 1}
    file.write_text('{"round": 1}\n{"round": 2}\n{"rou')
    assert records.newest() == {"round": 2}
    # Longer than what is read at first: many short lines, and lines that are longer than it.
    file.write_text("".join(json.dumps({"round": number}) + "\n" for number in range(20_000)))
    assert file.stat().st_size > 3 * TAIL_BYTES
    assert records.newest() == {"round": 19_999}
    long = {"round": 7, "text": "x" * 2 * TAIL_BYTES}
    file.write_text(json.dumps(long) + "\n")
    assert records.newest() == long
    file.write_text('{"round": 1}\n' + json.dumps(long) + "\n")
    assert records.newest() == long
