"""Bias and variance of the gradient statistics behind the norm test, against per-sample truth.

.venv/bin/python reproduce/estimators.py [RUN]
    # RUN: the folder of a finished run; otherwise one of 300k tokens is trained first

Three ways to measure S (the trace of the per-sample gradient covariance) and |G|^2 of a trainer
with two workers:

groups: on the first step of a round, where both workers have the same parameters, each splits its
    batch into four groups. This is what adloco does.
workers: on the same step, the two workers' batch gradients are the two groups.
last step: the same, after the workers have trained apart for H = 20 steps, as in the code that was
    published with the paper.

The truth comes from a population of windows whose per-sample gradients are all computed, at the
parameters that begin the next round (for the last step: the mean of the two workers). Batches are
drawn from it with replacement. Printed are the mean and the deviation over draws, as multiples of
the truth, and the request of the plug-in norm test with eta = 0.8, as a multiple of the request
that the truth would make.
"""

import copy
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from adloco import NormTest, estimate, group_moments
from adloco.cli.main import main as adloco
from adloco.rules.batch_rules.batch_rule import TrainingPoint
from adloco.rules.moments import GradientEstimate, Moments
from adloco.run.trained import load_trained
from adloco.tasks.language_model import next_token_loss
from adloco.tasks.task import TaskData

FOLDER = Path("runs/reproduce/estimators")
RULE = NormTest(eta=0.8, estimator="plug-in")
SAMPLES, STEPS, DRAWS, GROUPS = 512, 20, 2000, 4
BATCHES = (8, 32, 128)


def sample_gradients(model: nn.Module, windows: Tensor) -> Tensor:
    """The gradient of each window's loss, float32 [samples, parameters]."""
    rows = []
    for window in windows:
        model.zero_grad()
        next_token_loss(model, window[None]).backward()
        rows.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad]))
    return torch.stack(rows)


def trained_apart(model: nn.Module, windows: Tensor, lr: float) -> nn.Module:
    """A copy of the model after some inner steps on these windows."""
    own = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(own.parameters(), lr=lr)
    for batch in windows.chunk(STEPS):
        optimizer.zero_grad()
        next_token_loss(own, batch).backward()
        optimizer.step()
    return own


def middle(one: nn.Module, two: nn.Module) -> nn.Module:
    """A model with the mean of the parameters of both."""
    mean = copy.deepcopy(one)
    with torch.no_grad():
        for own, other in zip(mean.parameters(), two.parameters(), strict=True):
            own.lerp_(other, 0.5)
    return mean


def products(one: Tensor, two: Tensor) -> np.ndarray:
    """Inner products of all pairs of gradients, float64 [samples, samples]."""
    return (one @ two.T).double().numpy()


def truth(gram: np.ndarray) -> GradientEstimate:
    """S and |G|^2 of the population: drawing is with replacement, so it is all there is."""
    norm_sq = float(gram.mean())
    variance = float(np.trace(gram) / len(gram) - norm_sq)
    return GradientEstimate(grad_variance=variance, grad_norm_sq=norm_sq, plugin_norm_sq=norm_sq)


def inner(gram: np.ndarray, one: np.ndarray, two: np.ndarray) -> float:
    """The inner product of the mean gradients of two sets of samples."""
    return float(gram[np.ix_(one, two)].mean())


def by_groups(gram: np.ndarray, draws: list[np.ndarray]) -> GradientEstimate:
    """Two workers at one point, each with its batch in groups."""
    moments = Moments()
    for batch in draws:
        parts = np.split(batch, GROUPS)
        moments += group_moments(
            [len(part) for part in parts],
            [inner(gram, part, part) for part in parts],
            inner(gram, batch, batch),
        )
    found = estimate(moments)
    assert found is not None
    return found


def by_workers(grams: list[list[np.ndarray]], draws: list[np.ndarray]) -> GradientEstimate:
    """Two workers as two groups.

    Args:
        grams: Inner products of the gradients at worker i's and worker j's parameters.
        draws: Samples of each worker.
    """
    table = [[inner(grams[i][j], draws[i], draws[j]) for j in range(2)] for i in range(2)]
    mean_norm_sq = sum(map(sum, table)) / 4
    moments = group_moments([len(draws[0])] * 2, [table[0][0], table[1][1]], mean_norm_sq)
    found = estimate(moments)
    assert found is not None
    return found


def requested(found: GradientEstimate) -> int:
    """Samples that the norm test asks for."""
    return RULE.requested(found, TrainingPoint(samples=0, requested_batch=1, initial_batch=1))


def expected(true: GradientEstimate, batch: int) -> GradientEstimate:
    """The truth, with the plug-in |G|^2 that a mean over `batch` samples has on average."""
    return GradientEstimate(
        grad_variance=true.grad_variance,
        grad_norm_sq=true.grad_norm_sq,
        plugin_norm_sq=true.grad_norm_sq + true.grad_variance / batch,
    )


def show(name: str, found: list[GradientEstimate], true: GradientEstimate, mean_of: int) -> None:
    """Print a line of the table.

    Args:
        name: The way of measuring, and the batch.
        found: Its estimates.
        true: S and |G|^2 of the population.
        mean_of: Samples over which its plug-in |G|^2 takes the mean gradient.
    """
    variance = np.array([one.grad_variance for one in found]) / true.grad_variance
    norm = np.array([one.grad_norm_sq for one in found]) / true.grad_norm_sq
    requests = np.array([requested(one) for one in found]) / requested(expected(true, mean_of))
    low, high = np.percentile(requests, [5, 95])
    print(
        f"{name:<26} {variance.mean():5.2f} +- {variance.std():5.2f}   "
        f"{norm.mean():6.2f} +- {norm.std():6.2f}   {np.median(requests):5.2f} "
        f"({low:.2f} to {high:.2f})"
    )


def main(run: Path) -> int:
    if run == FOLDER and not (run / "summary.json").exists():
        words = ["--run.tokens", "300000", "--inner.lr", "2e-3", "--run.folder", str(run)]
        if code := adloco(["train", "local-sgd", *words]):
            return code
    trained = load_trained(run)
    recipe, stored = trained.stored.recipe, trained.stored
    task = recipe.task.open(TaskData(recipe.data, recipe.evaluation, stored.tokenizer))
    source = task.train_source(3, recipe.run.seed + 1, SAMPLES)
    model = trained.model.train()
    apart = [
        trained_apart(model, source.read(worker, 0, 8 * STEPS), recipe.inner.lr)
        for worker in range(2)
    ]
    population = source.read(2, 0, SAMPLES)
    here = sample_gradients(model, population)
    gram = products(here, here)
    there = [sample_gradients(one, population) for one in apart]
    grams = [[products(one, two) for two in there] for one in there]
    between = sample_gradients(middle(*apart), population)
    at_start, at_end = truth(gram), truth(products(between, between))

    print(f"{SAMPLES} windows, {DRAWS} draws, {here.shape[1]:,} parameters")
    for name, true in (("first step", at_start), ("after the round", at_end)):
        print(
            f"{name}: S {true.grad_variance:.3f}, |G|^2 {true.grad_norm_sq:.4f}, noise scale "
            f"{true.noise_scale:.1f}"
        )
    print(f"{'batch of a worker':<26} {'S^ / S':^14}   {'|G|^2^ / |G|^2':^16}   request")
    rng = np.random.default_rng(0)
    for batch in BATCHES:
        drawn = [[rng.integers(SAMPLES, size=batch) for _ in range(2)] for _ in range(DRAWS)]
        groups = [by_groups(gram, draws) for draws in drawn]
        same = [by_workers([[gram, gram], [gram, gram]], draws) for draws in drawn]
        last = [by_workers(grams, draws) for draws in drawn]
        show(f"{batch}, groups", groups, at_start, batch)
        show(f"{batch}, workers", same, at_start, 2 * batch)
        show(f"{batch}, last step", last, at_end, 2 * batch)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER))
