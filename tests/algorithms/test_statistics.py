"""The statistics a run takes against per-sample truth from torch.func, on a tiny language model."""

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from adloco import (
    BatchGuards,
    NormTest,
    SwitchMode,
    TensorSource,
)
from adloco.rules.batch_rules.batch_rule import BatchRule
from adloco.rules.merge_policies.smallest import MergeSmallest
from adloco.rules.moments import GradientEstimate
from tests.problems import make_run, params_of, sgd

VOCABULARY, CONTEXT = 7, 6


class TinyLM(nn.Module):
    """Two-token context: an embedding, a hidden layer over the last two, a head. With a tied head
    in the way of exactness.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(VOCABULARY, 5)
        self.hidden = nn.Linear(10, 5)
        self.head = nn.Linear(5, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        embedded = self.embedding(ids)
        before = torch.nn.functional.pad(embedded[:, :-1], (0, 0, 1, 0))
        return self.head(torch.tanh(self.hidden(torch.cat([embedded, before], -1))))


def lm_loss(model: nn.Module, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def per_sample_gradients(model: nn.Module, ids: Tensor) -> np.ndarray:
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss(values: dict[str, Tensor], row: Tensor) -> Tensor:
        logits = functional_call(model, values, (row[None, :-1],))
        return nn.functional.cross_entropy(logits[0], row[1:])

    gradients = vmap(grad(loss), in_dims=(None, 0))(parameters, ids)
    return torch.cat([gradient.flatten(1) for gradient in gradients.values()], 1).double().numpy()


def corpus(samples: int) -> Tensor:
    return (
        torch.randint(
            0, VOCABULARY, (samples, CONTEXT + 1), generator=torch.Generator().manual_seed(0)
        )
        // 2
    )


def one_round(
    rule: BatchRule, batch: int, groups: int
) -> tuple[GradientEstimate, list[tuple[list[int], list[np.ndarray], np.ndarray]]]:
    """A round of two workers that splits the batch into so many groups.

    Returns:
        (what the run measured, (samples of the groups, their mean gradients, the batch's mean
        gradient) of each worker, by per-sample gradients).
    """
    source = TensorSource(corpus(64), num_streams=2)
    run = make_run(
        build_model=TinyLM,
        loss_fn=lm_loss,
        data=source,
        inner=sgd(0.01),
        sync_every=1,
        batch=rule,
        test_groups=groups,
        guards=BatchGuards(initial=batch, maximum=1000),
        switch=SwitchMode(max_micro_batch=batch),
    )
    truth = []
    for worker, share in enumerate((batch - batch // 2, batch // 2)):
        gradients = per_sample_gradients(TinyLM(), source.read(worker, 0, share))
        sizes = [len(part) for part in np.array_split(np.arange(share), groups)]
        edges = np.cumsum([0, *sizes])
        means = [gradients[a:b].mean(0) for a, b in itertools.pairwise(edges)]
        truth.append((sizes, means, gradients.mean(0)))
    run.round()
    seen = run.trainers[0].controller.measured
    assert seen is not None
    return seen, truth


@pytest.mark.parametrize(("batch", "groups"), [(16, 4), (13, 5), (19, 8)])
def test_one_round_equals_the_formula_on_per_sample_gradients(batch: int, groups: int) -> None:
    seen, truth = one_round(NormTest(), batch, groups)
    scatter, dof, norms, unbiased, weights = 0.0, 0, [], [], []
    for sizes, means, mean in truth:
        share, norm_sq = sum(sizes), float(mean @ mean)
        own = sum(m * float(g @ g) for m, g in zip(sizes, means, strict=True)) - share * norm_sq
        scatter += own
        dof += groups - 1
        norms.append(norm_sq)
        unbiased.append(norm_sq - own / (groups - 1) / share)
        weights.append(share**2)
    assert seen.grad_variance == pytest.approx(scatter / dof, rel=1e-4)
    assert seen.plugin_norm_sq == pytest.approx(np.average(norms, weights=weights), rel=1e-4)
    assert seen.grad_norm_sq == pytest.approx(np.average(unbiased, weights=weights), rel=1e-3)


def trains_as_without(rule: BatchRule) -> None:
    """What a rule measures does not change the training."""
    results = []
    for each in (None, rule):
        run = make_run(
            build_model=TinyLM,
            loss_fn=lm_loss,
            data=TensorSource(corpus(64), num_streams=2),
            batch=each,
            guards=BatchGuards(initial=8, minimum=8, maximum=8),
        )
        list(run.rounds(3))
        results.append(params_of(run))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


def test_statistics_do_not_change_the_training() -> None:
    trains_as_without(NormTest())


@pytest.mark.parametrize(
    "groups", [3, *(pytest.param(groups, marks=pytest.mark.nightly) for groups in (2, 8))]
)
def test_expectation_on_a_language_model(groups: int) -> None:
    """Mean over 300 random batches of 8 from a finite corpus (drawn with replacement): E[S^] = S
    and E[G2^] = |G|^2 of per-sample truth.
    """
    ids = corpus(200)
    truth = per_sample_gradients(TinyLM(), ids)
    true_g = truth.mean(0)
    true_s = float(((truth - true_g) ** 2).sum(1).mean())
    variances, norms = [], []
    run = make_run(
        build_model=TinyLM,
        loss_fn=lm_loss,
        data=Draws(ids, 300 * 8),
        workers_per_trainer=1,
        inner=sgd(1e-30),
        batch=NormTest(),
        sync_every=1,
        test_groups=groups,
        guards=BatchGuards(initial=8, minimum=8, maximum=8),
    )
    for _ in run.rounds(300):
        seen = run.trainers[0].controller.measured
        assert seen is not None
        variances.append(seen.grad_variance)
        norms.append(seen.grad_norm_sq)
    assert np.mean(variances) == pytest.approx(true_s, abs=4 * np.std(variances) / np.sqrt(300))
    assert np.mean(norms) == pytest.approx(
        float(true_g @ true_g), abs=4 * np.std(norms) / np.sqrt(300)
    )


class Bowl(nn.Module):
    """Loss |w - x|^2 / 2 with a per-sample gradient of w - x: S is the trace of x's covariance, G
    is w minus its mean.
    """

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([0.5, -1.0, 2.0]))


def test_expectation_on_a_quadratic_with_unequal_workers() -> None:
    """500 rounds of two workers with 4 + 3 samples in two groups each, x of variances 1, 4 and 0.25
    around zero: S = 5.25, |G|^2 = 5.25.
    """
    x = torch.randn(500 * 7 * 2, 3, generator=torch.Generator().manual_seed(0)) * torch.tensor(
        [1.0, 2.0, 0.5]
    )
    run = make_run(
        build_model=Bowl,
        loss_fn=lambda model, x: ((model.w - x) ** 2).sum(1).mean() / 2,
        data=TensorSource(x, num_streams=2),
        inner=sgd(1e-30),
        batch=NormTest(),
        sync_every=1,
        test_groups=2,
        guards=BatchGuards(initial=7, minimum=7, maximum=7),
    )
    seen = [run.trainers[0].controller.measured for _ in run.rounds(500)]
    for values, truth in (
        ([s.grad_variance for s in seen if s], 5.25),
        ([s.grad_norm_sq for s in seen if s], 0.25 + 1 + 4),
    ):
        assert np.mean(values) == pytest.approx(truth, abs=4 * np.std(values) / np.sqrt(500))


class Draws:
    """Samples drawn with replacement, so that they are independent."""

    num_streams = 1

    def __init__(self, ids: Tensor, count: int) -> None:
        self.ids = ids
        self.rows = torch.randint(0, len(ids), (count,), generator=torch.Generator().manual_seed(7))

    def read(self, stream: int, position: int, count: int) -> Tensor:
        return self.ids[self.rows[position : position + count]]


def test_the_step_after_a_test_on_the_last_step_has_the_new_batch() -> None:
    """DDP-Norm as published (arXiv 2412.21124): plain SGD by hand, tested with per-sample gradients
    at the parameters of each third step. The last round ends with a step of five samples, whose
    gradient is their mean and whose statistics are those of five.
    """
    interval, eta, lr, batch = 3, 0.4, 0.1, 8
    source = TensorSource(corpus(4000), num_streams=1)
    run = make_run(
        build_model=TinyLM,
        loss_fn=lm_loss,
        data=source,
        workers_per_trainer=1,
        inner=sgd(lr),
        outer=None,
        sync_every=interval,
        batch=NormTest(eta=eta, estimator="plug-in"),
        test_groups=4,
        test_step="last",
        guards=BatchGuards(initial=batch, minimum=4, maximum=1000),
        switch=SwitchMode(max_micro_batch=1000),
    )
    model, position, batches = TinyLM(), 0, []
    for final in (0, 0, 0, 0, 5):
        report = run.round(final_samples=final)
        assert report is not None and report.trainers[0].trainer_batch == batch
        sizes = [batch, batch, final or batch]
        for step, size in enumerate(sizes):
            ids = source.read(0, position, size)
            position += size
            if step == interval - 1:
                gradients = per_sample_gradients(model, ids)
                groups = [gradients[part] for part in np.array_split(np.arange(size), 4)]
                mean = gradients.mean(0)
                scatter = sum(len(g) * float(g.mean(0) @ g.mean(0)) for g in groups)
                variance = (scatter - size * float(mean @ mean)) / 3
                following = max(4, int(np.ceil(variance / (eta**2 * float(mean @ mean)))))
            model.zero_grad()
            lm_loss(model, ids).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= lr * parameter.grad
        batches.append(batch)
        batch = following
    assert len({*batches[:4]}) == 4, "the batch changes in each round"
    assert batches[4] > 5, "and the last step has fewer samples"
    trainer = run.trainers[0]
    assert (run.state.samples, trainer.samples) == (position, position)
    assert trainer.requested_batch == following
    for mine, own in zip(model.parameters(), run.model(0).parameters(), strict=True):
        torch.testing.assert_close(own, mine)


def test_several_workers_are_tested_where_they_are_alike() -> None:
    with pytest.raises(ValueError, match=r"test\.step must be first where trainers have several"):
        make_run(test_step="last")
    with pytest.raises(ValueError, match="at the start or after a merge"):
        make_run(
            test_step="last", workers_per_trainer=1, num_trainers=2, merge=MergeSmallest(count=2)
        )
    with pytest.raises(ValueError, match="steps must be >= 1, got 0"):
        make_run(test_steps=0)
    with pytest.raises(ValueError, match="step must be first or last, got 'middle'"):
        make_run(test_step="middle")
