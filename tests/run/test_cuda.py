"""Runs on a GPU: the numbers of a CPU to rounding, resumed to the bit. Skipped without a GPU."""

import copy
import itertools
from pathlib import Path

import pytest
import torch

from adloco.algorithms import cuda_graphs, worker
from adloco.cli.main import main
from adloco.distributed.comm.buckets import Contributions
from adloco.distributed.comm.compressed import CompressedSum
from adloco.distributed.comm.sum_islands import Islands
from adloco.distributed.device import on_stream, read_later
from adloco.distributed.traffic import Traffic
from adloco.distributed.wire.bf16 import Bf16
from adloco.distributed.wire.int1 import Int1
from adloco.distributed.wire.int2 import Int2
from adloco.distributed.wire.int4 import Int4
from adloco.distributed.wire.int8 import Int8
from adloco.distributed.wire.wire_format import WireFormat
from adloco.run.trained import load_trained
from tests.problems import outer_sync, replica
from tests.run.test_training_run import make_run, numbers

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

ADAMW = ["--inner.optimizer", "adamw", "--inner.lr", "2e-3"]
RUNS = {
    "merging": ["adloco", "--merge.first_round", "2", "--merge.every", "3", *ADAMW],
    "one norm test a step": ["ddp-norm"],
    "streaming": ["diloco", "--streaming.fragments", "2", "--streaming.tau", "1"],
    "four bits": ["diloco", "--wire.format", "int4", "--wire.feedback", "params"],
}


def with_folder(words: list[str], folder: Path) -> list[str]:
    place = words.index("--run.folder")
    return [*words[: place + 1], str(folder), *words[place + 2 :]]


def assert_alike(folder: Path, other: Path) -> None:
    """Two runs have the same numbers, to rounding."""
    for line, expected in itertools.zip_longest(numbers(folder), numbers(other)):
        assert line["tokens"] == expected["tokens"]
        assert line["bytes_communicated"] == expected["bytes_communicated"]
        assert line["train_loss"] == pytest.approx(expected["train_loss"], rel=2e-3)


@pytest.mark.parametrize("name", RUNS)
def test_a_gpu_computes_what_a_cpu_computes(name: str, small: list[str], tmp_path: Path) -> None:
    fp32 = ["--run.precision", "fp32", "--batch.maximum", "24"]
    for device in ("cpu", "cuda"):
        words = [*RUNS[name], *with_folder(small, tmp_path / device), *fp32]
        assert main(["train", *words, "--run.device", device]) == 0
    assert_alike(tmp_path / "cuda", tmp_path / "cpu")
    for line, expected in zip(numbers(tmp_path / "cuda"), numbers(tmp_path / "cpu"), strict=True):
        for row, other in zip(line["trainers"], expected["trainers"], strict=True):
            assert row["requested_batch"] == other["requested_batch"]


def test_numbers_that_are_read_later_are_those_of_then() -> None:
    for device in range(torch.cuda.device_count()):
        numbers = torch.arange(3.0, device=f"cuda:{device}")
        read = read_later(numbers)
        numbers.zero_()
        assert read() == [0, 1, 2]


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_on_a_gpu_is_resumed_bit_for_bit(
    name: str, precision: str, small: list[str], tmp_path: Path
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    flags = ["--run.device", "cuda", "--run.precision", precision, "--run.checkpoint_every", "2"]
    words = [*RUNS[name], *with_folder(small, whole), *flags]
    assert main(["train", *words]) == 0
    recipe, *settings = with_folder(words, parts)
    rounds = make_run(recipe, settings).rounds()
    for _ in range(3):  # One more than the checkpoint has.
        next(rounds)
    rounds.close()  # type: ignore[attr-defined]
    assert main(["train", "--resume", str(parts)]) == 0
    assert numbers(parts) == numbers(whole)
    models = [load_trained(folder).model for folder in (whole, parts)]
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", "fp32"), ("bf16", "fp32"), ("bf16", "bf16")]
)
def test_captured_passes_and_updates_are_those_without(
    precision: str, dtype: str, small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["adloco", *small, "--run.device", "cuda", "--run.precision", precision]
    words += ["--model.dtype", dtype]
    assert main(["train", *with_folder(words, tmp_path / "captured")]) == 0
    monkeypatch.setattr(cuda_graphs, "LARGEST_WORK", 0)
    monkeypatch.setattr(worker, "can_capture", lambda optimizers: False)
    assert main(["train", *with_folder(words, tmp_path / "plain")]) == 0
    assert_alike(tmp_path / "captured", tmp_path / "plain")


def test_workers_that_compute_at_once_have_the_numbers_of_workers_in_turn(
    small: list[str], tmp_path: Path
) -> None:
    words = ["adloco", *small, "--run.device", "cuda", "--method.num_trainers", "4"]
    for threads in ("1", "4"):
        own = with_folder(words, tmp_path / threads)
        assert main(["train", *own, "--run.threads", threads]) == 0
    assert numbers(tmp_path / "1") == numbers(tmp_path / "4")


@pytest.mark.filterwarnings("ignore:.*grad attribute of a Tensor|.*Online softmax is disabled")
def test_compiled_passes_that_are_captured_are_those_without(
    small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*small, "--run.device", "cuda", "--method.num_trainers", "4", "--run.compile", "true"]
    assert main(["train", "adloco", *with_folder(words, tmp_path / "captured")]) == 0
    monkeypatch.setattr(worker, "has_graphs", lambda device: False)
    assert main(["train", "adloco", *with_folder(words, tmp_path / "plain")]) == 0
    assert_alike(tmp_path / "captured", tmp_path / "plain")


def test_memory_of_graphs_that_are_gone_takes_others() -> None:
    parameter = torch.ones(100, 100, device="cuda", requires_grad=True)
    lane = cuda_graphs.Lane(parameter.device)
    passes = cuda_graphs.CapturedPasses([parameter], lane, compiled=False)

    def compute(batch: torch.Tensor, share: torch.Tensor | float) -> torch.Tensor:
        loss = (batch @ parameter).sum() * share
        loss.backward()
        return loss.detach()

    with on_stream(lane.stream):
        for _ in range(3):
            loss = passes.run(compute, torch.ones(7, 100), 0.5, None)
            passes.forget()
            assert not passes.attached
            assert loss.item() == 0.5 * 7 * 100 * 100
            assert parameter.grad is not None
            assert parameter.grad.eq(3.5).all()
            parameter.grad = None


def updated(captured: bool) -> list[float]:
    """A parameter after six updates. After three its gradient is another tensor, and before the
    last one a state is loaded.
    """
    parameter = torch.ones(3, device="cuda", requires_grad=True)
    optimizer = torch.optim.AdamW([parameter], lr=0.1, fused=True)
    lane = cuda_graphs.Lane(parameter.device)
    update = cuda_graphs.CapturedUpdate([optimizer], lane)
    norm = torch.zeros((), dtype=torch.float64, device="cuda")
    with on_stream(lane.stream):
        for step in range(6):
            if step % 3 == 0:
                parameter.grad = torch.empty_like(parameter)
            if step == 5:
                state = copy.deepcopy(optimizer.state_dict())
                state["state"][0]["exp_avg"].mul_(-2)
                optimizer.load_state_dict(state)
            assert parameter.grad is not None
            parameter.grad.fill_(step + 1.0)
            if captured:
                update.run(lambda norm: optimizer.step(), norm)
            else:
                optimizer.step()
    return parameter.tolist()


def test_a_captured_update_takes_tensors_that_replaced_others() -> None:
    assert updated(True) == pytest.approx(updated(False), rel=1e-6)


def test_workers_get_parameters_of_both_types() -> None:
    """A kernel for many tensors may take the type of the first one (pytorch issue 173383)."""
    sizes = [(3, torch.bfloat16), (5, torch.float32), (7, torch.bfloat16), (9, torch.float32)]
    start = [torch.full((size,), 2.0, dtype=dtype, device="cuda") for size, dtype in sizes]
    params = [torch.zeros_like(each) for each in start]
    outer_sync(start, None).copy_to_workers(0, [replica(params)])
    assert all(each.eq(2).all() for each in params)


def test_two_ranks_that_share_a_gpu_have_the_numbers_of_one_process(
    small: list[str], tmp_path: Path
) -> None:
    words = ["diloco", *small, "--run.device", "cuda", "--wire.format", "int4"]
    assert main(["train", *with_folder(words, tmp_path / "one")]) == 0
    assert main(["train", *with_folder(words, tmp_path / "two"), "--ranks", "2"]) == 0
    assert_alike(tmp_path / "two", tmp_path / "one")


@pytest.mark.parametrize(
    ("ranks", "words"),
    [(2, ["ddp-norm"]), (2, ["fsdp-norm"]), (4, ["diloco", "--placement.shard_size", "2"])],
    ids=str,
)
def test_ranks_that_have_a_gpu_each_compute_what_cpus_compute(
    ranks: int, words: list[str], small: list[str], tmp_path: Path
) -> None:
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    words = [*words, *small, *ADAMW, "--run.precision", "fp32", "--ranks", str(ranks)]
    for device in ("cpu", "cuda"):
        own = with_folder(words, tmp_path / device)
        assert main(["train", *own, "--run.device", device]) == 0
    assert_alike(tmp_path / "cuda", tmp_path / "cpu")


def test_a_deterministic_run_repeats_each_bit(small: list[str], tmp_path: Path) -> None:
    """Over a context for which the backward pass of attention has no order of its own."""
    words = ["single", *small, "--run.device", "cuda", "--data.context_tokens", "1024"]
    words += ["--run.deterministic", "--run.tokens", "40000"]
    for name in ("one", "other"):
        assert main(["train", *with_folder(words, tmp_path / name)]) == 0
    assert numbers(tmp_path / "one") == numbers(tmp_path / "other")


@pytest.mark.parametrize("wire", [Bf16(), Int8(), Int4(), Int2(), Int1()], ids=repr)
def test_a_gpu_encodes_the_bits_that_a_cpu_encodes(wire: WireFormat) -> None:
    values = torch.randn(999, wire.block, generator=torch.Generator().manual_seed(1))
    values[:9] = 0
    encoded = wire.encode(values)
    assert torch.equal(wire.encode(values.cuda()).cpu(), encoded)
    assert torch.equal(wire.decode(encoded.cuda()).cpu(), wire.decode(encoded))


def test_what_is_encoded_for_a_sync_waits_for_no_device() -> None:
    """Also blocks that are not full, whose places are known on the host."""
    wire, islands = Int1(), Islands(workers=[1], traffic=Traffic())
    params = [torch.ones(size, device="cuda") for size in (3 * wire.block, 5)]
    given = Contributions(per_worker=[params], weights=[1.0], origin=params, wire=wire)
    try:
        for mode in ("default", "error"):  # The first time makes the format's tables.
            torch.cuda.set_sync_debug_mode(mode)
            CompressedSum(given, wire, islands)
    finally:
        torch.cuda.set_sync_debug_mode("default")
