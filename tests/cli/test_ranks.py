"""`adloco train` on several ranks of this machine: --ranks and torchrun, interrupts, refusals."""

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import adloco
from adloco.cli.main import main
from adloco.config.recipe import build_recipe, override, read_values
from adloco.distributed.testing import run_on_ranks
from adloco.run.starts import read_starts
from adloco.run.trained import load_trained
from adloco.run.training_run import TrainingRun
from tests.conftest import Train, WaitForSteps, small_flags, wait_for
from tests.pages import NEEDS_ELASTIC
from tests.problems import cases, without_timings
from tests.warm_python import children_of

ADLOCO = [sys.executable, "-m", "adloco"]
TORCHRUN = [
    sys.executable,
    "-m",
    "torch.distributed.run",
    *shlex.split(
        "--nproc-per-node 2 --master-port 0 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:0"
    ),
]
PLAIN = ["--wire.format", "fp32"]
"""Shards of small matrices are not whole blocks of another format."""
WARMUP = shlex.split("--batch.rule warmup --batch.batches [16,24] --batch.after_samples [100,300]")
FLAGS = ["--method.num_trainers", "3", "--merge.first_round", "2", "--merge.every", "2"]
FLAGS += ["--run.rounds", "5"]


def run_torchrun(words: list[str]) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*TORCHRUN, "-m", "adloco", "train", *words],
        capture_output=True,
        text=True,
        timeout=240,
        env=environment,
    )


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [
        without_timings(json.loads(line))
        for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]


def assert_close(left: Any, right: Any, tolerance: float, where: str = "") -> None:
    """Floats to this relative tolerance, everything else exactly."""
    assert type(left) is type(right), where
    if isinstance(left, dict):
        assert left.keys() == right.keys(), where
        for key in left:
            assert_close(left[key], right[key], tolerance, f"{where}.{key}")
    elif isinstance(left, list):
        assert len(left) == len(right), where
        for index, pair in enumerate(zip(left, right, strict=True)):
            assert_close(*pair, tolerance, f"{where}[{index}]")
    elif isinstance(left, float):
        assert left == pytest.approx(right, rel=tolerance), where
    else:
        assert left == right, where


@pytest.mark.parametrize(
    "starter",
    [
        "--ranks 3",
        pytest.param("--ranks 2", marks=pytest.mark.nightly),
        pytest.param("--ranks 4", marks=pytest.mark.nightly),
        pytest.param("torchrun", marks=pytest.mark.nightly),
    ],
)
def test_ranks_give_the_numbers_of_one_process(
    starter: str, small: list[str], tmp_path: Path, train: Train
) -> None:
    """To the last bit: bf16 orthogonalisation and 4-bit blocks would turn a bit into a percent."""
    # Each rank needs a worker; of equal flags the last one counts.
    flags = [*FLAGS, *(["--method.num_trainers", "4"] if starter == "--ranks 4" else [])]
    assert main(["train", "adloco", *small, *flags]) == 0
    expected = metrics(tmp_path / "run")
    assert any(line["merges"] for line in expected)
    words = ["adloco", *small, *flags, "--run.folder", str(tmp_path / "ranks")]
    done = run_torchrun(words) if starter == "torchrun" else train([*words, *starter.split()])
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("validation loss") == 1, "one rank shows, the others are silent"
    assert metrics(tmp_path / "ranks") == expected
    models = [load_trained(tmp_path / name).model for name in ("run", "ranks")]
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(one, other)
    assert (tmp_path / "ranks" / "report.html").exists()


@pytest.mark.parametrize(
    ("recipe", "ranks", "flags"),
    [
        pytest.param("ddp", 2, WARMUP, marks=pytest.mark.nightly),
        pytest.param("ddp-norm", 2, ["--switch.max_micro_batch", "4"], marks=pytest.mark.nightly),
        pytest.param("fsdp-norm", 2, ["--switch.max_micro_batch", "4"], marks=pytest.mark.nightly),
        pytest.param(
            "fsdp-norm",
            4,
            ["--placement.replica_size", "2", "--placement.shard_size", "2"],
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            "diloco", 4, ["--placement.shard_size", "2", *PLAIN], marks=pytest.mark.nightly
        ),
    ],
    ids=["ddp", "ddp-norm", "fsdp-norm", "fsdp-norm, HSDP", "diloco, sharded"],
)
def test_recipes_on_islands(
    recipe: str, ranks: int, flags: list[str], small: list[str], tmp_path: Path, train: Train
) -> None:
    """The losses equal those of one process in float32, where rounding grows; one process can also
    resume, evaluate and report a sharded run.
    """
    flags = [*flags, "--evaluation.every", "1"]
    one = [word for word in flags if "placement" not in word and word != "2"]
    folder = tmp_path / "islands"
    assert main(["train", recipe, *small, *one]) == 0
    done = train([recipe, *small, *flags, "--run.folder", str(folder), "--ranks", str(ranks)])
    assert done.returncode == 0, done.stderr
    mine, expected = metrics(folder), metrics(tmp_path / "run")
    assert [line["tokens"] for line in mine] == [line["tokens"] for line in expected]
    for line, other in zip(mine, expected, strict=True):
        assert line["val_loss"] == pytest.approx(other["val_loss"], rel=1e-3)
        # The ranks' shares of the text add up to its bytes.
        bits, expected_bits = (row["val_bits_per_byte"] / row["val_loss"] for row in (line, other))
        assert bits == pytest.approx(expected_bits, rel=1e-12)
        assert [row["requested_batch"] for row in line["trainers"]] == [
            row["requested_batch"] for row in other["trainers"]
        ]
    # Processors that compute in bf16 round more.
    assert mine[0]["train_loss"] == pytest.approx(expected[0]["train_loss"], rel=1e-4)
    model = 4 * json.loads((folder / "summary.json").read_text())["num_parameters"]
    assert mine[-1]["bytes_inside"] > 0.5 * model * mine[-1]["inner_steps"]
    assert (mine[-1]["bytes_communicated"] > 0) == (recipe == "diloco")
    assert main(["evaluate", str(folder)]) == 0
    # On other ranks than the recipe names; the budget is spent, so nothing is trained.
    words = shlex.split("--placement.shard_size 1 --placement.replica_size 1")
    assert main(["train", "--resume", str(folder), *words]) == 0


def make_run(words: list[str]) -> TrainingRun:
    """A run of diloco on the ranks of this launch."""
    values = override(
        read_values("diloco"),
        [(words[at].removeprefix("--"), words[at + 1]) for at in range(0, len(words), 2)],
    )
    return TrainingRun.create(build_recipe(values))


def begin(words: list[str], stop_after: int) -> None:
    """Train on the ranks of this launch, and stop within the round after `stop_after`."""
    run = make_run(words)
    for record in run.rounds():
        if record["round"] == stop_after:
            run.stop()


def tokens_within_a_round(words: list[str]) -> dict[int, int]:
    """The progress of a run in tokens, by inner steps of its first round."""
    run = make_run(words)
    found: dict[int, int] = {}

    def look(model: object, inputs: object) -> None:
        progress = run.progress()
        if progress.round_steps:
            found[progress.inner_step] = progress.tokens

    for worker in run.algorithm.workers.values():
        worker.model.register_forward_pre_hook(look)
    next(run.rounds())
    return found


def test_progress_within_a_round_counts_the_workers_of_all_ranks(
    small: list[str], tmp_path: Path
) -> None:
    """Two workers of 5 and 4 samples of 32 tokens in each step."""
    words = [*small, "--batch.initial", "9", "--method.sync_every", "4", "--run.rounds", "1"]
    expected = {step: step * 9 * 32 for step in range(4)}
    for found in run_on_ranks(tokens_within_a_round, 2, words):
        assert found == expected


@pytest.mark.parametrize(
    ("ranks", "shards", "going_on"),
    cases(
        {
            "4 sharded to 1": (4, 2, []),
            "2 to 4 sharded": (2, 1, ["--ranks", "4", "--placement.shard_size", "2"]),
            "4 sharded to 2 sharded": (4, 2, ["--ranks", "2"]),
        },
        default=(),
    ),
)
def test_a_run_resumes_from_disk_on_other_ranks(
    ranks: int, shards: int, going_on: list[str], small: list[str], tmp_path: Path
) -> None:
    """The losses equal those of a run that never stopped, in float32."""
    assert main(["train", "diloco", *small, *PLAIN]) == 0
    words = [
        *small,
        *PLAIN,
        "--run.folder",
        str(tmp_path / "moved"),
        "--placement.shard_size",
        str(shards),
    ]
    run_on_ranks(begin, ranks, words, 5)
    before = metrics(tmp_path / "moved")
    assert len(before) == 5
    flags = going_on or ["--placement.shard_size", "1"]
    assert main(["train", "--resume", str(tmp_path / "moved"), *flags]) == 0
    _, stop, went_on, _ = read_starts(tmp_path / "moved")
    assert stop.tokens == went_on.tokens == before[-1]["tokens"] and not went_on.interrupted
    expected, resumed = metrics(tmp_path / "run"), metrics(tmp_path / "moved")
    assert resumed[:5] == before
    assert [line["tokens"] for line in resumed] == [line["tokens"] for line in expected]
    assert [line["val_loss"] for line in resumed] == pytest.approx(
        [line["val_loss"] for line in expected], rel=1e-3
    )


def assert_on_loopback(processes: list[int]) -> None:
    """All sockets on which the processes listen are reached from this machine alone."""
    own = {
        link.readlink().name
        for process in processes
        for link in Path(f"/proc/{process}/fd").iterdir()
        if link.is_symlink()
    }
    listening = [
        line.split()[1].split(":")[0]
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
        if line.split()[3] == "0A" and f"socket:[{line.split()[9]}]" in own
    ]
    assert len(listening) >= 3, "the store, and gloo on each rank"
    assert set(listening) <= {"0100007F", "0000000000000000FFFF00000100007F"}


@pytest.mark.usefixtures("warm_python")
def test_ctrl_c_on_ranks_saves_and_leaves_no_orphan(
    small: list[str],
    tmp_path: Path,
    wait_for_steps: WaitForSteps,
) -> None:
    words = [
        *ADLOCO,
        "train",
        "diloco",
        *small,
        *shlex.split("--run.tokens 100000000 --method.sync_every 2000 --ranks 2"),
    ]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for_steps(2)
    children = children_of(process)
    assert len(children) == 2
    assert_on_loopback([process.pid, *children])
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert f"resume with: adloco train --resume {tmp_path / 'run'}" in out
    assert not any(Path(f"/proc/{child}").exists() for child in children)

    resumed = TrainingRun.resume(tmp_path / "run")  # In one process.
    assert resumed.algorithm.state.in_round
    assert all(worker.inner_step > 0 for worker in resumed.algorithm.workers.values())


TRAVELLING = shlex.split(
    "--streaming.fragments 2 --streaming.tau 19 --wire.format int1 "
    "--method.sync_every 40 --run.tokens 60000 --run.checkpoint_every 2"
)
"""A transfer is in flight for 19 of 20 steps."""


@pytest.fixture(scope="module")
def never_stopped(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Metrics of a run with these flags."""
    folder = tmp_path_factory.mktemp("whole")
    assert main(["train", "diloco", *small_flags(corpus, folder), *TRAVELLING, "--ranks", "2"]) == 0
    return metrics(folder / "run")


@pytest.mark.usefixtures("warm_python")
@pytest.mark.parametrize(
    "signal_number",
    cases({"ctrl c": (signal.SIGINT,), "kill": (signal.SIGKILL,)}, default=()),
)
def test_stopped_while_a_fragment_travels_it_resumes_as_if_it_had_not(
    signal_number: int, small: list[str], tmp_path: Path, never_stopped: list[dict[str, Any]]
) -> None:
    """Ctrl+C lets the fragment arrive first; after a kill, the run resumes from its last
    checkpoint.
    """
    process = subprocess.Popen(
        [*ADLOCO, "train", "diloco", *small, *TRAVELLING, "--ranks", "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    wait_for(tmp_path / "run" / "metrics.jsonl")
    while len(metrics(tmp_path / "run")) < 3:
        time.sleep(0.05)
    children = children_of(process)
    os.kill(process.pid if signal_number == signal.SIGINT else children[1], signal_number)
    _, err = process.communicate(timeout=60)
    assert process.returncode != 0, "the run was over before it could be stopped"
    assert len(metrics(tmp_path / "run")) < len(never_stopped), err
    assert main(["train", "--resume", str(tmp_path / "run"), "--ranks", "2"]) == 0
    assert metrics(tmp_path / "run") == never_stopped


FAILING = """
import itertools
import os
import sys

from torch.optim import AdamW
from torch.optim.optimizer import register_optimizer_step_pre_hook

from adloco.cli.main import main

inner_steps = itertools.count(0)


def fail(optimizer, args, kwargs):
    if os.environ["RANK"] == "1" and isinstance(optimizer, AdamW) and next(inner_steps) == 130:
        raise RuntimeError("the disk is on fire")


register_optimizer_step_pre_hook(fail)
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.nightly
def test_an_exception_while_a_fragment_travels_leaves_a_run_to_resume(
    small: list[str], tmp_path: Path, never_stopped: list[dict[str, Any]]
) -> None:
    """The exception is in inner step 10 of round 4, where a fragment is in flight from step 1 to 20
    and the other rank waits for it.
    """
    script = tmp_path / "failing.py"
    script.write_text(FAILING)
    done = subprocess.run(
        [*TORCHRUN, str(script), "train", "diloco", *small, *TRAVELLING],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode != 0
    assert "the disk is on fire" in done.stderr
    assert len(metrics(tmp_path / "run")) == 3
    assert main(["train", "--resume", str(tmp_path / "run"), "--ranks", "2"]) == 0
    assert metrics(tmp_path / "run") == never_stopped


@pytest.mark.nightly
def test_a_polite_kill_of_torchrun_saves(
    small: list[str],
    tmp_path: Path,
    wait_for_steps: WaitForSteps,
) -> None:
    """SLURM sends such a signal before the end of a job (examples/slurm.sh)."""
    words = [
        *TORCHRUN,
        "-m",
        "adloco",
        "train",
        "ddp",
        *small,
        *shlex.split("--run.tokens 100000000 --method.sync_every 2000"),
    ]
    process = subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    wait_for_steps(2)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert f"resume with: adloco train --resume {tmp_path / 'run'}" in out

    from adloco.run.stored import read_run

    assert read_run(tmp_path / "run").algorithm["round_steps"] == 2000


@pytest.mark.usefixtures("warm_python")
def test_a_rank_that_fails_stops_the_others_with_one_message(
    small: list[str], train: Train
) -> None:
    explosive = shlex.split(
        "--inner.optimizer sgd --inner.lr 1e6 --inner.momentum 0 "
        "--method.max_grad_norm 0 --learning_rate.shape constant"
    )
    done = train(
        ["diloco", *small, *explosive, "--learning_rate.warmup_fraction", "0", "--ranks", "2"]
    )
    assert done.returncode == 2
    assert "loss is " in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("loss is ") == 2, "each rank says so"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["diloco", "--ranks", "3"],
            "3 ranks cannot share 2 workers; start at most 2 ranks, or ask for more workers",
        ),
        (["diloco", "--ranks", "0"], "--ranks must be >= 1, got 0"),
        (["diloco", "--ranks", "2", "--run.token", "5"], "did you mean 'tokens'?"),
        (
            ["diloco", "--ranks", "3", "--placement.shard_size", "2"],
            (
                "3 ranks cannot share 2 workers with placement.shard_size 2 and "
                "placement.replica_size 1; start at most 4 ranks, a multiple of 2"
            ),
        ),
        (
            ["diloco", "--placement.shard_size", "2"],
            (
                "1 rank cannot share 2 workers with placement.shard_size 2 and "
                "placement.replica_size 1; start at most 4 ranks, a multiple of 2"
            ),
        ),
        (
            ["ddp", "--placement.shard_size", "0"],
            "placement.shard_size must be > 0 with placement.replica_size = 0, got 0",
        ),
    ],
)
def test_refusals(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def errors_of(ranks: list[subprocess.Popen[str]]) -> list[str]:
    """Error messages of ranks that all fail."""
    try:
        errors = [rank.communicate(timeout=60)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert all(rank.returncode != 0 for rank in ranks)
    return errors


def start_by_hand(
    commands: list[list[str]], environments: dict[int, dict[str, str]] | None = None
) -> list[subprocess.Popen[str]]:
    """Start ranks without a launcher; rank 0 hosts the store."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    meeting = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(len(commands)),
    }
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    shared = (
        os.environ
        | meeting
        | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    )
    return [
        subprocess.Popen(
            command,
            env=shared
            | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            | (environments or {}).get(rank, {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, command in enumerate(commands)
    ]


BROKEN = """
import sys, torch, adloco
from tests.problems import make_run, regression

class Broken:
    num_streams = 2
    def read(self, stream, position, count):
        if torch.distributed.get_rank() == 1 and position >= 40:
            raise LookupError("row 40 cannot be read")
        return regression(2).read(stream, position, count)

with adloco.process_group():
    workers = 1 if sys.argv[1] != "1 1" else 2
    placement = adloco.place(workers, "cpu", 1, *map(int, sys.argv[1].split()))
    run = make_run(workers_per_trainer=workers, data=Broken(), placement=placement)
    list(run.rounds(10))
"""


@pytest.mark.usefixtures("warm_python")
@pytest.mark.parametrize(
    "island",
    cases(
        {"own islands": ("1 1",), "replicas": ("1 2",), "shards": ("2 1",)},
        default=(),
    ),
)
def test_every_rank_ends_with_the_first_failing_rank_s_message(island: str, tmp_path: Path) -> None:
    """Rank 1 fails in mid-round, rank 0 waits for it: in a sync, or inside a step."""
    script = tmp_path / "broken.py"
    script.write_text(BROKEN)
    ranks = start_by_hand([[sys.executable, str(script), island]] * 2)
    errors = errors_of(ranks)
    assert "LookupError: row 40 cannot be read" in errors[1]
    assert "OtherRankError: rank 1: row 40 cannot be read" in errors[0]


@contextmanager
def two_ranks(
    small: list[str], tmp_path: Path, *words: str
) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A command that trains on two ranks without end, and their process ids, after a round."""
    endless = ["train", "ddp", *small, "--run.tokens", "100000000", "--ranks", "2", *words]
    process = subprocess.Popen(
        [*ADLOCO, *endless], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        wait_for(tmp_path / "run" / "metrics.jsonl")
        yield process, children_of(process)
    finally:
        process.kill()


@pytest.mark.usefixtures("warm_python")
def test_a_killed_rank_stops_the_others(small: list[str], tmp_path: Path) -> None:
    with two_ranks(small, tmp_path) as (process, children):
        os.kill(children[1], signal.SIGKILL)
        _, error = process.communicate(timeout=30)
    assert process.returncode != 0
    # Whichever notices first: rank 0, or the process that started both.
    silent = f"rank 1 on {socket.gethostname()} gave no sign of life after rank 0 lost a connection"
    assert silent in error or "rank 1 was ended by signal 9" in error
    assert f"resume with: adloco train --resume {tmp_path / 'run'}" in error
    assert "Traceback" not in error
    assert not Path(f"/proc/{children[0]}").exists()


@pytest.mark.nightly
def test_torchrun_restarts_ranks_without_further_settings(
    small: list[str], tmp_path: Path, never_stopped: list[dict[str, Any]]
) -> None:
    folder = tmp_path / "run"
    run_on_ranks(begin, 2, [*small, *TRAVELLING], 2)
    process = subprocess.Popen(
        [*TORCHRUN, "--max-restarts", "1", "-m", "adloco", "train", "--resume", str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while len(metrics(folder)) < 4:
        time.sleep(0.05)
    children = children_of(process)
    os.kill(children[1], signal.SIGKILL)
    _, error = process.communicate(timeout=400)
    assert process.returncode == 0, error
    assert "exitcode: -9" in error, "the run was over before it could be killed"
    assert metrics(folder) == never_stopped


@pytest.mark.usefixtures("warm_python")
@pytest.mark.nightly
def test_a_polite_kill_is_heard_while_a_rank_waits_for_a_stopped_one(
    small: list[str], tmp_path: Path
) -> None:
    with two_ranks(small, tmp_path, "--run.grace_seconds", "2") as (process, children):
        os.kill(children[1], signal.SIGSTOP)
        time.sleep(1)  # Rank 0 comes to a collective meanwhile.
        process.send_signal(signal.SIGTERM)
        _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "told to stop by SIGTERM, but another rank failed, or did not come" in error
    assert not any(Path(f"/proc/{child}").exists() for child in children)


@pytest.mark.usefixtures("warm_python")
@NEEDS_ELASTIC
def test_a_stopped_rank_is_named(small: list[str], tmp_path: Path) -> None:
    with two_ranks(small, tmp_path, "--run.silent_seconds", "4") as (process, children):
        os.kill(children[1], signal.SIGSTOP)
        _, error = process.communicate(timeout=60)
    assert process.returncode == 1
    assert error == (
        f"adloco (rank 0): rank 1 on {socket.gethostname()} has given no sign of life for "
        "silent_seconds = 4 s; it is stopped, or its machine or link is down; "
        f"resume with: adloco train --resume {tmp_path / 'run'}\n"
    )
    assert not any(Path(f"/proc/{child}").exists() for child in children)


@pytest.mark.usefixtures("warm_python")
def test_ranks_that_mean_different_runs_are_refused(small: list[str], tmp_path: Path) -> None:
    """Two ranks started by hand that differ in their seed, in what a resumed run may change, and in
    their code.
    """
    shutil.copytree(Path(adloco.__file__).parent, tmp_path / "other" / "adloco")
    with (tmp_path / "other" / "adloco" / "__init__.py").open("a") as changed:
        changed.write("# changed\n")
    ranks = start_by_hand(
        [
            [*ADLOCO, "train", "diloco", *small, "--run.seed", seed, "--evaluation.every", every]
            for seed, every in (("0", "1"), ("1", "2"))
        ],
        {1: {"PYTHONPATH": str(tmp_path / "other")}},
    )
    said = re.search(
        r"adloco \(rank 1\): (.*) differs between ranks; "
        "start all of them with the same recipe, flags and code",
        errors_of(ranks)[1],
    )
    assert said
    assert set(said[1].split(", ")) == {"run.seed", "evaluation.every", "the code of adloco"}
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("warm_python")
def test_ranks_with_different_texts_are_refused(
    small: list[str], tmp_path: Path, corpus: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for index in range(30):
        (other / f"{index}.txt").write_text(f"another text {index} " * 300)
    paths = [["--data.path", str(path)] for path in (corpus, other)]
    ranks = start_by_hand([[*ADLOCO, "train", "diloco", *small, *paths[rank]] for rank in (0, 1)])
    assert "the text of data.path differs between ranks" in errors_of(ranks)[1]
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("warm_python")
def test_a_bad_flag_on_one_rank_ends_all(small: list[str]) -> None:
    flags = [[], ["--run.tokens", "-5"]]
    errors = errors_of(
        start_by_hand([[*ADLOCO, "train", "diloco", *small, *flags[rank]] for rank in (0, 1)])
    )
    assert "run.tokens must be > 0, got -5" in errors[1]
    assert "rank 1: run.tokens must be > 0, got -5" in errors[0]


@pytest.mark.usefixtures("warm_python")
@pytest.mark.parametrize(
    "number",
    cases({"hangup": (signal.SIGHUP,), "kill": (signal.SIGKILL,)}, default=()),
)
def test_a_closed_terminal_leaves_no_orphan(
    number: signal.Signals, small: list[str], tmp_path: Path
) -> None:
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip("under nohup, processes ignore a hangup")
    words = [*ADLOCO, "train", "ddp", *small, "--run.tokens", "100000000", "--ranks", "2"]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for(tmp_path / "run" / "metrics.jsonl")
    children = children_of(process)
    assert len(children) == 2
    process.send_signal(number)
    process.wait(timeout=60)
    deadline = time.monotonic() + 120
    while any(Path(f"/proc/{child}").exists() for child in children):
        assert time.monotonic() < deadline, "ranks are left behind"
        time.sleep(0.2)
