"""benchmarks/bench.py: its pairs, what it makes of readings, and its tables on the page."""

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from adloco.algorithms.model_state import Replica
from adloco.tasks.language_model import next_token_loss

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def bench() -> Any:
    """Gives a module of the benchmark by its name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        yield import_module


def test_sides_take_turns(bench: Any) -> None:
    now, order = [0.0], []

    def side(name: str, seconds: float) -> None:
        order.append(name)
        now[0] += seconds

    def meet() -> None:
        order.append("meet")

    seconds = bench("bench_pairs").in_turns(
        {"a": lambda: side("a", 2.0), "b": lambda: side("b", 3.0)},
        3,
        meet=meet,
        warm_up=1,
        clock=lambda: now[0],
    )
    assert seconds == {"a": [2.0] * 3, "b": [3.0] * 3}
    assert [name for name in order if name != "meet"] == list("baabbaab")
    assert order.count("meet") == 2 * 8


def test_a_row_has_the_median_and_the_quartiles_of_the_pairs(bench: Any) -> None:
    pairs = bench("bench_pairs")
    row = pairs.Row.of("x", "y", [1.0, 2.0, 3.0, 4.0, 10.0], [1.0, 1.0, 2.0, 1.0, 2.0])
    # The ratios are 1, 2, 1.5, 4 and 5.
    assert (row.low, row.ratio, row.high, row.pairs) == (1.5, 2.0, 4.0, 5)
    assert (row.seconds, row.against_seconds) == (3.0, 1.0)
    # A step that takes half as long again, once in 20 steps: 20.5 steps in place of 20.
    assert pairs.Row.of("x", "y", [3.0], [2.0], as_part_of=20).ratio == pytest.approx(20.5 / 20)


def test_the_numbers_of_a_turn(bench: Any) -> None:
    numbers, job = bench("bench_peers"), bench("peer_job")
    clock, sent, readings = 1000.0, 0, []
    for step in range(job.STEPS):
        readings.append({"time": clock, "loopback_bytes": sent})
        clock += 0.1
        if (step + 1) % job.SYNC_EVERY == 0:
            clock, sent = clock + 0.5, sent + 3_000_000
    turn = numbers.measured(readings, {"loss": 2.5, "version": "1.0"}, 995.0)
    assert turn["start_seconds"] == pytest.approx(5.1)
    assert turn["sync_seconds"] == pytest.approx(0.5)
    assert turn["round_megabytes"] == pytest.approx(3.0)
    assert turn["steps_per_second"] == pytest.approx(job.SYNC_EVERY / (0.1 * job.SYNC_EVERY + 0.5))
    half = turn | {"steps_per_second": turn["steps_per_second"] / 2}
    peer = numbers.summed_up("diloco", "other", [half, half], [turn, turn])
    found = [peer[name] for name in ("ratio", "pairs", "loss", "version")]
    assert found == [0.5, 2, 2.5, "1.0"]


def test_the_page_has_the_tables_of_the_measurements(bench: Any) -> None:
    page = (ROOT / "benchmarks" / "performance.md").read_text()
    parts = json.loads((ROOT / "benchmarks" / "bench.json").read_text())
    told = "write them again with `make bench`"
    assert bench("bench_tables").with_tables(parts, page) == page, told
    assert list(parts) == [name for name in bench("bench").PARTS if name in parts]


def test_the_tables_say_what_failed_and_what_missed_its_goal(bench: Any) -> None:
    pairs, numbers = bench("bench_pairs"), bench("bench_peers")
    rows = [
        pairs.Row.of("mine", "theirs", [1.2], [1.0], goal=1.15),
        pairs.Count(what="graphs", of="5 sizes", count=2, goal=3),
    ]
    failed = numbers.without("diloco", "other", "pip cannot install it: no")
    parts = {
        "outer-sync": {"rows": [vars(row) for row in rows]},
        "peers": {"rows": [failed]},
    }
    tables = bench("bench_tables")
    assert tables.ratios(parts).splitlines()[2:] == [
        "| mine | theirs | **1.200** | 1.200 to 1.200 | 1 | 1.2 s / 1 s | 1.15, missed |",
        "| graphs | 5 sizes | **2** (a count) |  |  |  | 3 |",
    ]
    assert "| DiLoCo | other | pip cannot install it: no |" in tables.peers(parts)


def test_what_the_benchmark_on_a_gpu_refuses(
    bench: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gpu = bench("gpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(gpu, "FOLDER", tmp_path)
    for words, problem in (
        ([], "this script needs a CUDA device; torch finds none"),
        (["--platform", "cpu", "--stage", "formats"], "--stage formats needs a CUDA device, not"),
        (["--table"], "nothing is stored in .*; measure it first"),
    ):
        with pytest.raises(ValueError, match=problem):
            gpu.main(words)


def test_what_is_stored_is_shown_without_its_gpu(
    bench: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu = bench("gpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(gpu, "FOLDER", tmp_path)
    for name in ("one", "two"):
        stored = {"formats": {"int8": {"milliseconds": 2.5, "device": name}}}
        (tmp_path / f"{name}.json").write_text(json.dumps(stored))
    gpu.main(["--table"])
    assert (
        capsys.readouterr().out
        == "\n\n".join(
            f"{name}\nformats · int8: milliseconds 2.5, device {name}" for name in ("one", "two")
        )
        + "\n"
    )


def test_what_the_benchmark_on_a_gpu_measures(bench: Any) -> None:
    gpu = bench("gpu")
    matrices = gpu.hidden_matrices(gpu.WIDTH, gpu.LAYERS, torch.device("meta"))
    sizes = [matrix.numel() for matrix in matrices]
    # 2 of 1024 x 1024, 2 of 256 x 1024 and 3 of 2816 x 1024, in each of 24 layers.
    assert (len(sizes), sum(sizes)) == (168, 24 * 1024 * (2 * 1024 + 2 * 256 + 3 * 2816))
    # Parameters, gradients, two moments and what rounding takes off, in bf16, of both workers.
    on_host = "diloco --inner.optimizer muon --model.dtype bf16 --outer.on_host true"
    assert gpu.planned_bytes(on_host, 1000) == 2 * 5 * 2 * 1000
    small = gpu.hidden_matrices(16, 1, torch.device("cpu"))
    for step in gpu.optimizer_steps(small).values():
        before = [matrix.detach().clone() for matrix in small]
        step()
        moved = zip(before, small, strict=True)
        assert not any(torch.equal(old, matrix) for old, matrix in moved)


def test_what_fails_on_a_gpu_does_not_end_what_is_measured_beside_it(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = bench("gpu")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    found = dict(gpu.times({"bad": lambda: 1 / 0, "good": lambda: None}))
    assert found["bad"] == {"failure": "ZeroDivisionError: division by zero"}
    assert found["good"]["milliseconds"] >= 0
    monkeypatch.setitem(gpu.MEASURED, "formats", lambda: found.items())
    assert dict(gpu.measure("formats", {})) == found


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # torch.func
def test_the_written_llama_of_the_gpu_benchmark_is_that_of_transformers(bench: Any) -> None:
    stacked, gpu = bench("gpu_stacked"), bench("gpu")
    small = "--model.hidden_size 32 --model.num_layers 2 --model.num_heads 4 --model.num_kv_heads 2"
    recipe = gpu.recipe_of(f"single {small} --model.intermediate_size 48 --data.context_tokens 9")
    build = gpu.open_recipe(recipe).builder
    models = [build() for _ in range(3)]
    generator = torch.Generator().manual_seed(0)
    for model in models:
        build.filling(model, model)
        model.double()
        for parameter in model.parameters():
            parameter.data.normal_(generator=generator, std=0.3)
    params, _ = torch.func.stack_module_state(models)
    params = {name: each.detach().requires_grad_() for name, each in params.items()}
    ids = torch.randint(256, (3, 2, 10), generator=generator)
    losses = stacked.stacked_loss(models[0].config, params, ids)
    losses.sum().backward()
    for each, model in enumerate(models):
        loss = next_token_loss(model, ids[each])
        loss.backward()
        # transformers normalises, and takes cross-entropies, in float32.
        torch.testing.assert_close(losses[each], loss.detach(), rtol=1e-6, atol=0)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(
                params[name].grad[each], parameter.grad, rtol=1e-4, atol=1e-6, msg=name
            )
    ways = stacked.ways(build, 2, 9, torch.device("cpu"))
    alone = ways["in turn"]()
    for name in ("torch.func", "written"):
        torch.testing.assert_close(ways[name](), alone, rtol=0.02, atol=0, msg=name)


@pytest.mark.parametrize("wire", ["fp32", "int1"])
def test_a_sync_of_the_gpu_benchmark_moves_all_four_workers(
    bench: Any, wire: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    of = Replica.of
    monkeypatch.setattr(Replica, "of", lambda *given: seen.append(of(*given)) or seen[-1])
    sync = bench("gpu").sync_of_four(wire, 16, 1, torch.device("cpu"))
    before = [worker.params[0].detach().clone() for worker in seen]
    assert sync().num_bytes > 0
    assert len(seen) == 4
    for worker, old in zip(seen, before, strict=True):
        assert not worker.params[0].equal(old)


@pytest.mark.usefixtures("warm_python")
def test_stages_on_a_gpu_are_stored_and_not_measured_twice(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu, file = bench("gpu"), tmp_path / "found" / "device.json"
    line = ["--platform", "cpu", "--tiny", "--stage", "default", "--json", str(file)]
    runs = {"one": f"single {gpu.MUON}", "bad": "single --inner.lr -1"}
    monkeypatch.setitem(gpu.RUNS, "default", lambda: runs)
    # Another device is there, which is not the one that is asked for.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    gpu.main(line)
    found = json.loads(file.read_text())["default"]
    assert found["one"]["rounds"] == 1
    assert found["one"]["tokens"] == 2 * 8 * 32
    assert found["one"]["tokens_per_second"] > 0
    assert found["one"]["deviation"] == 0  # There is one round.
    assert found["one"]["device"] == "cpu"
    assert "inner.lr" in found["bad"]["failure"]
    assert "default · one: seconds" in capsys.readouterr().out

    # What failed is measured again, the rest is not.
    trained: list[str] = []

    def train(words: str, seconds: float) -> dict[str, Any]:
        trained.append(words)
        return {"words": words, "seconds": 1}

    monkeypatch.setattr(gpu, "trained", train)
    gpu.main(line)
    again = json.loads(file.read_text())["default"]
    assert (again["one"], again["bad"]["seconds"], len(trained)) == (found["one"], 1, 1)
    capsys.readouterr()
    gpu.main(line)
    assert (capsys.readouterr().out, len(trained)) == ("default: stored\n", 1)
    gpu.main([*line, "--again"])
    assert len(trained) == 3
    # What has other words since is measured again.
    runs["one"] += " --inner.lr 1e-3"
    gpu.main(line)
    assert len(trained) == 4 and trained[-1].startswith(runs["one"])

    # What has ended is stored, also if the next one never ends.
    def interrupted(words: str, seconds: float) -> dict[str, Any]:
        if words.startswith(runs["bad"]):
            raise KeyboardInterrupt
        return {"words": words, "seconds": 2}

    monkeypatch.setattr(gpu, "trained", interrupted)
    with pytest.raises(KeyboardInterrupt):
        gpu.main([*line, "--again"])
    assert json.loads(file.read_text())["default"]["one"]["seconds"] == 2


@pytest.mark.parametrize(
    ("found", "said"),
    [
        # 9% slower: within three deviations of 3%; 5% larger is just within.
        ({"tokens_per_second": 92.0, "peak_bytes": 105}, ""),
        ({"milliseconds": 10.4}, ""),
        ({"does_not_fit": "42 GiB are too few"}, "42 GiB are too few"),
        ({"tokens_per_second": 91.0, "peak_bytes": 100}, "seconds a token 1.1 times"),
        ({"tokens_per_second": 120.0, "peak_bytes": 106}, "peak_bytes 1.06 times"),
        ({"milliseconds": 11.0}, "milliseconds 1.1 times those that are stored, which is more"),
        ({"failure": "exit code 2: no memory"}, "exit code 2: no memory"),
    ],
)
def test_a_version_that_is_worse_than_what_is_stored_fails_its_check(
    bench: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    found: dict[str, Any],
    said: str,
) -> None:
    gpu, file = bench("gpu"), tmp_path / "device.json"
    line = ["--platform", "cpu", "--tiny", "--stage", "default", "--json", str(file)]
    runs = {"one": "single", "not measured yet": "ddp"}
    monkeypatch.setitem(gpu.RUNS, "default", lambda: runs)
    numbers = {"tokens_per_second": 100.0, "peak_bytes": 100, "deviation": 0.03}
    if "milliseconds" in found:
        numbers = {"milliseconds": 10.0, "deviation": 0.001}
    words = f"single --run.device cpu {gpu.TINY}"
    file.write_text(json.dumps({"default": {"one": numbers | {"words": words}}}))
    before = file.read_text()
    monkeypatch.setattr(gpu, "trained", lambda *_: found)
    if said:
        with pytest.raises(SystemExit) as ended:
            gpu.main([*line, "--check"])
        assert ended.value.code == 1
    else:
        gpu.main([*line, "--check"])
    assert capsys.readouterr().out.startswith(f"default · one: {said or 'no worse'}")
    assert file.read_text() == before


def test_a_trial_of_the_script_leaves_the_devices_results_alone(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = bench("gpu")
    monkeypatch.setattr(gpu, "FOLDER", tmp_path)
    monkeypatch.setattr(gpu, "trained", lambda words, _: {"seconds": 1})
    gpu.main(["--platform", "cpu", "--tiny"])
    assert [*tmp_path.iterdir()] == []
    gpu.main(["--platform", "cpu"])
    stored = json.loads((tmp_path / "cpu.json").read_text())
    assert list(stored) == list(gpu.RUNS)
