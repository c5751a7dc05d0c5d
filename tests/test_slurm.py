"""examples/slurm.sh with a SLURM of two lines: what it starts, in its words."""

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "examples" / "slurm.sh"


@pytest.mark.parametrize(
    ("words", "trained"),
    [
        ([], "diloco --placement.shard_size 0 --run.folder runs/slurm-77"),
        (["adloco", "--run.tokens", "2000"], "adloco --run.tokens 2000 --run.folder runs/slurm-77"),
        (["--run.tokens", "2000"], "--run.tokens 2000 --run.folder runs/slurm-77"),
        (["--resume", "runs/slurm-1"], "--resume runs/slurm-1"),
    ],
)
def test_what_the_script_starts(words: list[str], trained: str, tmp_path: Path) -> None:
    for name, line in (("scontrol", 'printf "node7\\nnode8\\n"'), ("srun", 'echo "$@"')):
        (tmp_path / name).write_text(f"#!/bin/bash\n{line}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {
        "SLURM_JOB_ID": "77",
        "SLURM_JOB_NODELIST": "node[7-8]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_GPUS_ON_NODE": "4",
    }
    environment = os.environ | slurm | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", str(SCRIPT), *words], capture_output=True, text=True, check=True, env=environment
    )
    rendezvous = (
        "--nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint node7:29400 --rdzv-id 77"
    )
    assert (
        done.stdout.strip() == f"--kill-on-bad-exit=1 torchrun {rendezvous} --shutdown-timeout 110 "
        f"-m adloco train --run.grace_seconds 110 {trained}"
    )
