"""What a user waits for, as ratios: adloco against a loop by hand, against bare collectives, and
beside other libraries.

    .venv/bin/python benchmarks/bench.py [--part NAME] [--quick] [--json FILE]

Both sides of a comparison take turns in one process (or on the same ranks), because the speed of a
machine changes with what else it does. The result is the median of the pairs' ratios, with its
quartiles. Each part runs in a process of its own and replaces its rows in benchmarks/bench.json,
with the commit, the machine and its load; then the tables of benchmarks/performance.md are written
from that file.
"""

import datetime
import importlib
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench_tables import write_tables
from common import script_parser

from adloco.run.environment import processor
from adloco.whole_file import write_text

# Threads that wait do not spin. On a machine that does other work, spinning ones would make a side
# with several threads many times slower. Set before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

ROOT = Path(__file__).absolute().parents[1]
PARTS = {
    "single": "bench_steps:single",
    "norm-test": "bench_steps:norm_test",
    "muon": "bench_ranks:muon",
    "outer-sync": "bench_ranks:outer_sync",
    "outer-sync-links": "bench_links:outer_sync",
    "ddp": "bench_ranks:ddp",
    "wire-formats": "bench_ranks:wire_format_times",
    "co-located": "bench_steps:co_located",
    "recompiles": "bench_steps:recompiles",
    "checkpoints": "bench_steps:checkpoints",
    "prepare": "bench_steps:prepare_text",
    "peers": "bench_peers:peers",
}
"""The module and function of each part, imported only where the part runs."""


def main() -> int:
    parser = script_parser(__doc__)
    parser.add_argument("--part", choices=PARTS, help="measure this part only")
    parser.add_argument("--quick", action="store_true", help="the smallest cases only")
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "bench.json")
    parser.add_argument("--page", type=Path, default=ROOT / "benchmarks" / "performance.md")
    given = parser.parse_args()
    if given.part is None:
        return all_parts()
    parts = json.loads(given.json.read_text()) if given.json.exists() else {}
    parts[given.part] = measure(given.part, quick=given.quick)
    kept = {name: parts[name] for name in PARTS if name in parts}
    write_text(given.json, json.dumps(kept, indent=1) + "\n")
    write_tables(kept, given.page)
    return 0


def all_parts() -> int:
    """Measure each part in a process of its own; 1 if any failed, after the others have run."""
    began, failed = time.monotonic(), []
    for part in PARTS:
        command = [sys.executable, __file__, *sys.argv[1:], "--part", part]
        if subprocess.run(command).returncode:
            failed.append(part)
    print(f"{time.monotonic() - began:.0f} s in all")
    if failed:
        print(f"these parts ended with an error: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def measure(part: str, *, quick: bool) -> dict[str, Any]:
    """The rows of a part, and where and when they were measured."""
    print(f"{part}:", flush=True)
    module, function = PARTS[part].split(":")
    began, load = time.monotonic(), os.getloadavg()[0]
    rows = []
    for row in getattr(importlib.import_module(module), function)(quick=quick):
        rows.append(row if isinstance(row, dict) else asdict(row))
        print(f"  {json.dumps(rows[-1])}", flush=True)
    import torch

    commit = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    )
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "quick": quick,
        "seconds": round(time.monotonic() - began),
        "load": [round(load, 1), round(os.getloadavg()[0], 1)],
        "commit": commit.stdout.strip(),
        "machine": f"{os.cpu_count()} cores, {processor()}",
        "torch": torch.__version__,
        "rows": rows,
    }


if __name__ == "__main__":
    sys.exit(main())
