"""benchmarks/links.py on a tiny model: the bytes that a run counts are those that the kernel
counts, and nothing is left behind, however it ends.
"""

import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[1] / "benchmarks" / "links.py"
LINK = ["--bandwidth", "50mbit", "--arms", "diloco-fp32"]
ROUND = re.compile(r"round +([0-9]+) .* counted +([0-9.]+) MB +kernel +([0-9.]+) MB")


def words(small: list[str], folder: Path, *others: str) -> list[str]:
    """The program on the fixture's settings, less those that are its own business."""
    own = ("--run.tokens", "--run.checkpoint_every", "--run.trackers", "--run.folder")
    settings = [
        word
        for name, value in zip(small[::2], small[1::2], strict=True)
        if name not in own
        for word in (name, value)
    ]
    files = ["--json", str(folder / "links.json")]
    return [
        sys.executable,
        str(PROGRAM),
        *LINK,
        *files,
        *settings,
        "--model.hidden_size",
        "96",
        *others,
    ]


def skip_if_refused(code: int | None, errors: str) -> None:
    if code == 2:
        pytest.skip(f"virtual links are not permitted here: {errors.strip()}")


def traces() -> list[str]:
    """Network interfaces and named namespaces of this machine; where it has no `ip`, the program
    refuses.
    """
    if not shutil.which("ip"):
        return []
    return [
        subprocess.run(["ip", *kind], capture_output=True, text=True, check=True).stdout
        for kind in (["-br", "link"], ["netns"])
    ]


def processes(folder: Path) -> list[str]:
    """Command lines that name the folder (the program, its ranks), or are of the process that
    carries packets.
    """
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = file.read_bytes().replace(b"\0", b" ").decode()
        except OSError:  # It has ended meanwhile.
            continue
        if str(folder) in line or "links_pump.py" in line:
            found.append(line)
    return found


@pytest.mark.nightly
def test_counted_bytes_are_those_of_the_kernel(small: list[str], tmp_path: Path) -> None:
    before = traces()
    done = subprocess.run(
        words(small, tmp_path, "--tokens", "4096"),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    skip_if_refused(done.returncode, done.stderr)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "links.json").read_text())
    assert results["link"]["bandwidth_by"] in ("tc tbf", "userspace pump between TUN devices")
    arm = results["arms"]["diloco-fp32"]
    assert len(arm["rounds"]) == 4
    assert arm["counted_bytes"] > 1e6
    for link in arm["links"]:
        assert link["counted_per_payload"] == pytest.approx(1, abs=0.05)
        # A header of at least 52 bytes for each packet of at most 1500, and acknowledgements.
        assert 0.85 < link["counted_per_tx_bytes"] < 0.97
    assert "| diloco-fp32 | 1 |" in done.stdout
    assert traces() == before
    assert not processes(tmp_path)


@pytest.mark.nightly
def test_nothing_stays_of_a_program_that_was_killed(small: list[str], tmp_path: Path) -> None:
    """The links are those whose packets are carried by a process of the benchmark."""
    before = traces()
    command = words(small, tmp_path, "--tokens", "100000000", "--without-tc", "--latency-ms", "5")
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout
        assert program.stderr
        found = next(
            (
                found
                for line in program.stdout
                if (found := ROUND.search(line)) and int(found[1]) == 3
            ),
            None,
        )
        if not found:
            skip_if_refused(program.wait(), program.stderr.read())
            pytest.fail(f"it ended before the third round: {program.returncode}")
        assert processes(tmp_path)
        program.kill()
    # The kernel ends its ranks, and with the last of them their namespaces go.
    deadline = time.monotonic() + 120
    while processes(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not processes(tmp_path)
    assert traces() == before
    assert 0.85 < float(found[2]) / float(found[3]) < 0.97
