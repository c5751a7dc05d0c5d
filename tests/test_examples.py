"""The pieces in others' loops (docs/python.md): what the examples print is what a plain loop
over models in one process computes. And the notebook.
"""

import ast
import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import pytest
import torch
from matplotlib import pyplot as plt
from torch import nn
from torch.utils.data import DistributedSampler

import adloco
from tests.conftest import SMALL

EXAMPLES = Path(__file__).parents[1] / "examples"
TORCHRUN = (
    "-m",
    "torch.distributed.run",
    "--rdzv-backend",
    "c10d",
    "--rdzv-endpoint",
    "127.0.0.1:0",
    "--nproc-per-node",
)


def run(file: str, ranks: int) -> str:
    launcher = [sys.executable, *(() if ranks == 1 else (*TORCHRUN, str(ranks)))]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launcher, EXAMPLES / file], capture_output=True, text=True, timeout=200, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def pieces(file: str) -> dict[str, Any]:
    """The functions and constants of an example."""
    return runpy.run_path(str(EXAMPLES / file), run_name="example")


def workers_in_one_process(
    example: dict[str, Any],
    num_workers: int,
    batches: Sequence[Any],
    loss_fn: Callable[[nn.Module, Any], torch.Tensor],
    inner: Callable[[nn.Module], torch.optim.Optimizer],
    max_grad_norm: float = float("inf"),
) -> float:
    """The oracle: as many models, each with every so many-th batch; the sum of the first one's
    parameters after the last sync.
    """
    models = [example["make_model"]() for _ in range(num_workers)]
    optimizers = [inner(model) for model in models]
    diloco = adloco.DiLoCo(models, outer=example["make_outer"](), sync_every=example["SYNC_EVERY"])
    for step in range(example["STEPS"]):
        for worker, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            loss_fn(model, batches[step * num_workers + worker]).backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
        diloco.step()
    return sum(parameter.detach().double().sum().item() for parameter in models[0].parameters())


def check_workers(output: str, num_workers: int, expected: float) -> None:
    spreads = [
        (int(step), float(spread))
        for step, spread in re.findall(r"step (\d+):.* workers (\S+) apart", output)
    ]
    assert len(spreads) >= 4
    for step, spread in spreads:
        within_a_round = step % 10 == 5 or step % 100 == 90
        assert spread > 1e-3 if within_a_round and num_workers > 1 else spread == 0, (
            "no averaging within a round, equal after a sync"
        )
    found = re.search(
        rf"^{num_workers} workers, \d+ syncs: sum of all parameters (\S+)$", output, re.MULTILINE
    )
    assert found
    assert float(found[1]) == pytest.approx(
        expected, abs=5e-3
    )  # Rounding, in the sum of 25,000 parameters.


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [1, 2])
def test_accelerate(ranks: int) -> None:
    example = pieces("accelerate_loop.py")
    loader = example["make_loader"]()
    epochs = -(-example["STEPS"] * ranks // len(loader))
    batches = [batch for _ in range(epochs) for batch in loader]
    expected = workers_in_one_process(
        example,
        ranks,
        batches,
        lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
        lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3),
    )
    check_workers(run("accelerate_loop.py", ranks), ranks, expected)


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [1, 2])
def test_lightning_trainer(ranks: int) -> None:
    pytest.importorskip("lightning", reason="pip install lightning")
    example = pieces("lightning_trainer.py")
    data = example["make_data"]()
    orders: list[list[int]] = []
    for worker in range(ranks):
        # Several processes read in an order that Lightning shuffles.
        sampler = DistributedSampler(data, ranks, worker, shuffle=ranks > 1)
        orders.append([])
        for epoch in range(ranks):
            sampler.set_epoch(epoch)
            orders[-1] += [*sampler]
    size = 16
    batches = [
        data[order[size * step : size * (step + 1)]]
        for step in range(example["STEPS"])
        for order in orders
    ]
    expected = workers_in_one_process(
        example,
        ranks,
        batches,
        lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
        lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3),
    )
    check_workers(run("lightning_trainer.py", ranks), ranks, expected)


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [1, 2])
def test_hugging_face_trainer(ranks: int) -> None:
    example = pieces("hf_trainer.py")
    size = example["BATCH"]
    rows = torch.stack(
        [torch.stack([row["input_ids"], row["labels"]]) for row in example["make_data"]()]
    )
    expected = workers_in_one_process(
        example,
        ranks,
        rows.split(size),
        lambda model, batch: model(input_ids=batch[:, 0], labels=batch[:, 1]).loss,
        lambda model: torch.optim.AdamW(
            model.parameters(), lr=example["LEARNING_RATE"], weight_decay=0.0
        ),
        max_grad_norm=1.0,  # The Trainer's default.
    )
    check_workers(run("hf_trainer.py", ranks), ranks, expected)


@pytest.mark.nightly
def test_norm_test_in_one_process_and_data_parallel() -> None:
    """Batches are equal, and losses and noise scales are equal up to rounding. The first noise
    scale is that of per-sample gradients, and the model learns.
    """
    one, two = (run("norm_test_loop.py", ranks) for ranks in (1, 2))
    numbers = [
        [float(number) for number in re.findall(r"\d+(?:\.\d+)?", text)] for text in (one, two)
    ]
    assert numbers[0] == pytest.approx(numbers[1], rel=2e-3)
    decisions = [re.findall(r"batch (\d+).*next (\d+)", text) for text in (one, two)]
    assert decisions[0] == decisions[1]
    requests = [int(after) for _, after in decisions[0]]
    assert len(requests) == 8
    assert requests[0] < requests[1] <= requests[-1] == 256

    example = pieces("norm_test_loop.py")
    model, windows = example["make_model"](), example["make_data"]().read(0, 0, 8)
    gradients = []
    for window in windows:
        grads = torch.autograd.grad(
            example["mean_loss"](model, window[None]), list(model.parameters())
        )
        gradients.append(torch.cat([gradient.flatten() for gradient in grads]).double())
    norms_sq = [gradient.square().sum().item() for gradient in gradients]
    mean_norm_sq = torch.stack(gradients).mean(dim=0).square().sum().item()
    moments = adloco.group_moments([1] * 8, norms_sq, mean_norm_sq)
    controller = adloco.BatchController(
        adloco.NormTest(eta=2.0), adloco.BatchGuards(initial=8, maximum=256, max_growth=2.0)
    )
    controller.update(adloco.estimate(moments), 8)
    assert controller.estimate is not None
    noise_scale = controller.estimate.noise_scale
    found = re.search(r"noise scale (\S+),", one)
    assert found
    assert float(found[1]) == pytest.approx(noise_scale, rel=1e-3)
    losses = [float(loss) for loss in re.findall(r"loss (\S+)[,\n]", one)]
    assert losses[-1] < losses[0] / 2


def test_the_notebook_runs(
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its cells run from top to bottom, with a smaller budget, text and model; what a cell shows
    can be shown.
    """
    notebook = json.loads((EXAMPLES / "first_steps.ipynb").read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))  # For the cache of its text.
    monkeypatch.setattr("adloco.cli.training_loop.write_report", lambda folder: None)
    matplotlib.use("agg")
    namespace: dict[str, Any] = {}
    for cell in cells:
        code = ast.parse("".join(cell["source"]))
        shown = code.body.pop() if isinstance(code.body[-1], ast.Expr) else None
        exec(compile(code, "first_steps.ipynb", "exec"), namespace)
        if shown is not None:
            value = eval(
                compile(ast.Expression(shown.value), "first_steps.ipynb", "eval"), namespace
            )
            assert repr(value)
        if "parameters" in cell["metadata"].get("tags", ()):
            sizes = {name: SMALL[name] for name in namespace["SMALL"]}
            namespace |= {"TOKENS": 1500, "DATA": corpus, "SMALL": sizes}
    plt.close("all")
    assert namespace["report"].round == 3
    assert len(list((tmp_path / "runs").iterdir())) == 3
