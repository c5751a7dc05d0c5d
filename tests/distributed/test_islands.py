"""What a worker on several ranks computes, against per-sample truth, hand-counted bytes and plain
data-parallel training.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from adloco import (
    AdLoCo,
    BatchGuards,
    DiLoCo,
    MergeFates,
    MergeSmallest,
    NormTest,
    Streaming,
    SwitchMode,
)
from adloco.distributed.dtensor import gather_shards
from adloco.distributed.launch.launcher import place
from adloco.distributed.placement.islands import island_shape
from adloco.distributed.testing import run_on_ranks
from tests.algorithms.test_statistics import per_sample_gradients
from tests.problems import BlockLM, adamw, cases, make_run, next_token, outer_sgd, sgd, tokens

ISLANDS = {"DDP": (1, 2), "FSDP2": (2, 1), "HSDP": (2, 2)}
"""Shards and replicas. HSDP, which is both, runs in the nightly job."""


def run_here(shards: int, replicas: int, **changes: Any) -> AdLoCo:
    """A language model in float64 on whatever ranks there are."""
    settings = {
        "build_model": BlockLM,
        "loss_fn": next_token,
        "workers_per_trainer": 1,
        "outer": None,
        "inner": sgd(1.0),
    } | changes
    workers = settings.pop("num_workers", settings["workers_per_trainer"])
    settings.setdefault("data", tokens(2000, workers))
    return make_run(**settings, placement=place(workers, torch.device("cpu"), 1, shards, replicas))


def one_step(shards: int, replicas: int) -> list[dict[str, float]]:
    """Statistics of the first step, and how far a clipped step of SGD goes, for several batches."""
    seen = []
    for batch, micro_batch in ((16, 16), (16, 2), (13, 13), (13, 2)):
        run = run_here(
            shards,
            replicas,
            batch=NormTest(),
            guards=BatchGuards(initial=batch),
            switch=SwitchMode(max_micro_batch=micro_batch, mode="always"),
            sync_every=1,
            test_groups=4,
            max_grad_norm=0.01,
        )
        before = [parameter.detach().clone() for parameter in BlockLM().parameters()]
        report = run.round()
        assert report is not None
        after = gather_shards(list(run.workers[0].replica.params))
        moved = sum(
            float((new - old).detach().square().sum())
            for new, old in zip(after, before, strict=True)
        )
        estimate = run.trainers[0].controller.measured
        assert estimate is not None
        row = {
            "grad_variance": estimate.grad_variance,
            "grad_norm_sq": estimate.grad_norm_sq,
            "noise_scale": estimate.noise_scale,
        }
        seen.append(
            row
            | {
                "plugin": estimate.plugin_norm_sq,
                "clipped_norm": math.sqrt(moved),
                "loss": report.train_loss,
            }
        )
    return seen


def truth(batch: int, groups: int) -> dict[str, float]:
    """The same numbers as `one_step`, computed from the gradient of every sample."""
    ids = tokens(2000, 1).read(0, 0, batch)
    gradients = per_sample_gradients(BlockLM(), ids)
    parts = np.array_split(gradients, groups)
    mean = gradients.mean(0)
    scatter = sum(len(part) * float(part.mean(0) @ part.mean(0)) for part in parts) - batch * float(
        mean @ mean
    )
    variance = scatter / (groups - 1)
    norm_sq = float(mean @ mean) - variance / batch
    return {
        "grad_variance": variance,
        "grad_norm_sq": norm_sq,
        "noise_scale": variance / norm_sq if norm_sq > 0 else math.inf,
        "plugin": float(mean @ mean),
        "clipped_norm": 0.01,
        "loss": float(next_token(BlockLM(), ids).detach()),
    }


@pytest.mark.parametrize(
    ("shards", "replicas"),
    cases({"one process": (1, 1)} | ISLANDS, default=("one process", "DDP", "FSDP2")),
)
def test_statistics_are_those_of_the_samples(shards: int, replicas: int) -> None:
    """Statistics match to 1e-6, with and without accumulation, for equal and unequal batches."""
    results = (
        run_on_ranks(one_step, shards * replicas, shards, replicas)
        if shards * replicas > 1
        else [one_step(1, 1)]
    )
    # 16 in 8 micro-batches of 2; 13 in 7, of which the next multiple of four groups is 8.
    expected = [truth(16, 4), truth(16, 8), truth(13, 4), truth(13, 8)]
    for result in results:
        for row, true in zip(result, expected, strict=True):
            assert row == pytest.approx(true, rel=1e-6)


class Dealt:
    """One stream dealt to several workers, each step's samples in turn: what data-parallel ranks
    read.
    """

    def __init__(self, samples: int, num_streams: int, each: int) -> None:
        self.num_streams = num_streams
        self._source, self._each = tokens(samples, 1), each

    def read(self, stream: int, position: int, count: int) -> Any:
        step, offset = divmod(position, self._each)
        return self._source.read(0, (step * self.num_streams + stream) * self._each + offset, count)


def ddp(shards: int, replicas: int) -> list[Tensor]:
    run = run_here(shards, replicas, inner=sgd(0.1), guards=BatchGuards(initial=12), sync_every=5)
    list(run.rounds(2))
    return [
        parameter.detach().clone()
        for parameter in gather_shards(list(run.workers[0].replica.params))
    ]


@pytest.mark.parametrize(("shards", "replicas"), cases(ISLANDS, default=("DDP", "FSDP2")))
def test_ddp_is_a_sync_at_every_step(shards: int, replicas: int) -> None:
    """H = 1 with the trivial outer step, for an inner step that is linear in the gradient; and
    plain SGD on whole batches.
    """
    on_ranks = run_on_ranks(ddp, shards * replicas, shards, replicas)
    synced = run_here(
        1,
        1,
        inner=sgd(0.1),
        guards=BatchGuards(initial=12),
        sync_every=1,
        workers_per_trainer=4,
        outer=outer_sgd(1.0),
        data=Dealt(2000, 4, 3),
    )
    list(synced.rounds(10))
    plain, source = BlockLM(), tokens(2000, 1)
    for step in range(10):
        loss = next_token(plain, source.read(0, 12 * step, 12))
        for parameter, gradient in zip(
            plain.parameters(), torch.autograd.grad(loss, list(plain.parameters())), strict=True
        ):
            parameter.data.sub_(gradient, alpha=0.1)
    for other in (*on_ranks, synced.trainers[0].outer.global_params):
        for mine, theirs in zip(plain.parameters(), other, strict=True):
            torch.testing.assert_close(mine.data, theirs, rtol=1e-6, atol=1e-9)


def merged_steps(shards: int) -> list[float]:
    """Step counters and squared moments of AdamW after two merges that average them, in float32,
    where counters and moments have one data type.
    """

    def inner(model: nn.Module) -> list[torch.optim.Optimizer]:
        return [torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)]

    run = run_here(
        shards,
        1,
        build_model=lambda: BlockLM().float(),
        num_trainers=3,
        inner=inner,
        merge=MergeSmallest(every=1, first_round=1),
        fates=MergeFates(inner_state="mean"),
        sync_every=3,
        guards=BatchGuards(initial=8),
        data=tokens(500, 3),
        workers_per_trainer=1,
        num_workers=3,
    )
    list(run.rounds(2))
    states = gather_shards([worker.optimizers[0].state_dict() for worker in run.workers.values()])
    return [
        float(entry[key].sum())
        for state in states
        for entry in state["state"].values()
        for key in ("step", "exp_avg_sq")
    ]


@pytest.mark.parametrize(
    "num_ranks", cases({"an island": (2,), "two islands": (4,)}, default=("two islands",))
)
def test_sharded_and_other_state_do_not_share_memory(num_ranks: int) -> None:
    expected = merged_steps(1)
    assert expected[0] == 6.0
    assert run_on_ranks(merged_steps, num_ranks, 2)[0] == pytest.approx(
        expected[: 20 if num_ranks == 4 else None], rel=1e-4
    )


class Even(nn.Module):
    """96 parameters in a block and 32 outside, which two and four ranks divide."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Linear(8, 12, bias=False)])
        self.last = nn.Linear(8, 4, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = self.blocks[0](inputs)
        output: Tensor = self.last(hidden[:, :8])
        return output


def traffic(shards: int, replicas: int) -> tuple[float, float, float]:
    """Bytes given to collectives in two rounds of two workers, with H = 3 and two passes a step."""
    run = run_here(
        shards,
        replicas,
        build_model=Even,
        loss_fn=lambda model, ids: model(ids.float()).square().mean(),
        data=tokens(500, 2, context=7),
        workers_per_trainer=2,
        outer=outer_sgd(0.7, 0.9),
        inner=adamw(0.01),
        batch=NormTest(),
        sync_every=3,
        test_groups=4,
        guards=BatchGuards(initial=32, minimum=32, maximum=32),
        switch=SwitchMode(max_micro_batch=8 // (shards * replicas), mode="always"),
        max_grad_norm=1.0,
    )
    list(run.rounds(2))
    return run.placement.total_bytes()


@pytest.mark.parametrize(
    ("num_ranks", "shards", "replicas"),
    cases(
        {"whole": (2, 1, 1)} | {name: (4, *island) for name, island in ISLANDS.items()},
        default=("whole", "DDP", "HSDP"),
    ),
)
def test_traffic_is_what_the_algorithm_needs_to_the_byte(
    num_ranks: int, shards: int, replicas: int
) -> None:
    results = run_on_ranks(traffic, num_ranks, shards, replicas)
    between, _, inside = results[0]
    model, rounds, workers, steps, passes, ranks = 4 * 128, 2, 2, 3, 2, shards * replicas
    # A sync takes one model from each worker, however many ranks it is on; a round, its losses and
    # 23 other float64 (ten of the norm test).
    assert between == rounds * workers * (model + (22 + steps) * 8)
    # Each rank adds up three scalars a step, one before and two after the steps, nine of the sync;
    # and 1 + 4 for the norm test, which has four groups or one per pass.
    scalars = 8 * (3 * steps + 3 + 9 + 1 + max(4, passes * ranks)) if ranks > 1 else 0
    if shards > 1:
        # For each pass, the block is gathered in forward and in backward, what is outside once;
        # gradients are scattered whole.
        passed = passes * steps * (4 * (2 * 96 + 32) // shards + model)
        # Replicas of the shards add theirs up once a step. (The two workers of HSDP share an
        # island: no slices of an outer step.)
        passed += steps * model // shards if replicas > 1 else 0
    else:
        # Gradients once a step; then the slices of the outer step are gathered.
        passed = steps * model + model // replicas if ranks > 1 else 0
    assert inside == workers * ranks * rounds * (scalars + passed)
    assert all(result == results[0] for result in results)


class Idle(nn.Linear):
    """A model with a parameter that is never used."""

    def __init__(self) -> None:
        super().__init__(7, 1)
        self.idle = nn.Parameter(torch.zeros(3))


def unused(shards: int, replicas: int) -> str:
    settings = {
        "build_model": Idle,
        "loss_fn": lambda model, ids: model(ids.float()).square().mean(),
        "guards": BatchGuards(initial=8),
    }
    run = run_here(shards, replicas, data=tokens(100, 1, context=6), inner=sgd(0.01), **settings)
    try:
        run.round()
    except ValueError as error:
        return str(error)
    return ""


def test_replicas_refuse_parameters_without_gradient() -> None:
    """DDP would leave the whole bucket unreduced, and each replica with a model of its own; the
    others train such models.
    """
    assert unused(1, 1) == ""
    assert run_on_ranks(unused, 2, 2, 1) == ["", ""]
    for said in run_on_ranks(unused, 2, 1, 2):
        assert "some parameters got no gradient, which replicas cannot add up" in said


class Branches(nn.Module):
    """A model whose samples each take one of two ways, in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.ways = nn.ModuleList([nn.Linear(7, 1), nn.Linear(7, 1)])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.taken = not getattr(self, "taken", dist.get_rank() == 1)
        return self.ways[self.taken](ids)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_shards_refuse_parameters_that_some_micro_batches_use(micro_batches: int) -> None:
    """FSDP2 would add the gradient of one way to that of the other, which has the same size."""
    for said in run_on_ranks(branching, 2, micro_batches):
        assert "some parameters got a gradient on some micro-batches only" in said


def branching(micro_batches: int) -> str:
    run = run_here(
        2,
        1,
        build_model=Branches,
        loss_fn=lambda model, ids: model(ids.float()).square().mean(),
        data=tokens(100, 1, context=6),
        inner=sgd(0.01),
        guards=BatchGuards(initial=4 * micro_batches),
        switch=SwitchMode(max_micro_batch=2, mode="always"),
    )
    try:
        run.round()
    except ValueError as error:
        return str(error)
    return ""


class Own(torch.optim.AdamW):
    """An optimizer that the package does not know."""


def rounded(shards: int, replicas: int) -> list[tuple[int, int, int, int]]:
    """Requested, trained and added samples of an inner step, and the samples of a round of two."""
    run = run_here(
        shards, replicas, batch=None, sync_every=2, guards=BatchGuards(initial=1, maximum=1)
    )
    (report,) = run.rounds(1)
    (row,) = report.trainers
    return [(row.requested_batch, row.trainer_batch, row.rounded_up, report.samples)]


def test_a_sample_on_every_rank_is_reported_also_above_the_maximum() -> None:
    assert run_on_ranks(rounded, 2, 1, 2)[0] == [(1, 2, 1, 4)]


def torch_muon(model: nn.Module) -> list[torch.optim.Optimizer]:
    """torch's own Muon, which takes each shard for a matrix."""
    parameters = list(model.parameters())
    matrices = [parameter for parameter in parameters if parameter.ndim == 2]
    rest = [parameter for parameter in parameters if parameter.ndim != 2]
    return [torch.optim.Muon(matrices), torch.optim.AdamW(rest)]


def refused(shards: int, replicas: int) -> list[str]:
    """Error messages about settings that need whole matrices."""
    said = []
    for changes in (
        {"inner": torch_muon},
        {"inner": lambda model: [Own(model.parameters())]},
    ):
        try:
            run_here(
                shards,
                replicas,
                build_model=lambda: BlockLM().float(),
                guards=BatchGuards(initial=8),
                **changes,
            ).round()
            said.append("")
        except ValueError as error:
            said.append(str(error))
    model, placement = BlockLM(), place(1, "cpu", 1, shards, replicas)
    placement.engine(model)
    try:
        DiLoCo(model, outer=Own, sync_every=1, placement=placement)
        said.append("")
    except ValueError as error:
        said.append(str(error))
    return said


def two_rounds(asked: bool) -> list[float]:
    """Sums of the parameters after two rounds; asked: the model between them, then a stop."""
    run = run_here(2, 1, guards=BatchGuards(initial=8), sync_every=2)
    run.round()
    if asked:
        with torch.no_grad():
            run.model(0)(torch.zeros(1, 4, dtype=torch.long))
        run.stop()
        assert run.round() is None
    assert run.round() is not None
    return [float(each.sum()) for each in gather_shards(list(run.workers[0].replica.params))]


def test_a_round_may_stop_before_its_first_step_although_shards_are_gathered() -> None:
    """FSDP2 leaves its root gathered after a forward pass, as other parameters than the shards."""
    assert run_on_ranks(two_rounds, 2, True) == run_on_ranks(two_rounds, 2, False)


def answers(asked: bool) -> list[float]:
    """Of global parameters while workers differ, again once they are loaded, and of a state.

    asked: The model is asked before each of them, which otherwise finds it in shards.
    """
    sizes: dict[str, Any] = {"workers_per_trainer": 2, "guards": BatchGuards(initial=8)}
    run = run_here(2, 1, streaming=Streaming(fragments=2), **sizes)
    model = run.workers[0].model

    def ask(model: nn.Module = model) -> float:
        with torch.no_grad():
            return float(model(torch.zeros(1, 4, dtype=torch.long))[0, 0, 0])

    state = run.placement.agree(run.state_dict())
    list(run.rounds(2))
    changes: list[Callable[[], Any]] = [run.load_global, lambda: run.load_state_dict(state)]
    if asked:
        ask()
    found = [run.evaluate(lambda model, part, parts: [ask(model), 1.0])[0][0]]
    for change in changes:
        ask()
        if not asked:
            model.reshard()  # type: ignore[operator]
        change()
        found.append(ask())
    return found


def test_a_model_that_was_asked_follows_what_is_loaded() -> None:
    """Its root would stay gathered, beside blocks of other parameters."""
    plain = run_on_ranks(answers, 2, False)
    evaluated, loaded, state = plain[0]
    assert evaluated == loaded != state
    assert run_on_ranks(answers, 2, True) == plain


def rates_of_sending() -> list[float | None]:
    """The fastest transfers of two trainers and of one, each of two workers for a rank or two."""
    runs = [
        run_here(1, 1, num_workers=2 * k, num_trainers=k, workers_per_trainer=2) for k in (2, 1)
    ]
    reports = [report for run in runs for report in run.rounds(1)]
    assert all(report.sync.bytes > 0 for report in reports)
    return [report.sync.peak_bytes_per_second for report in reports]


def test_only_what_crosses_between_islands_has_a_rate_of_sending() -> None:
    """On two ranks each of two trainers has one for its workers, and one trainer has both."""
    for within, between in run_on_ranks(rates_of_sending, 2):
        assert within is None
        assert between > 0


def test_what_needs_more_than_a_shard_is_refused() -> None:
    """Shards refuse these settings, and replicas run them."""
    for said in run_on_ranks(refused, 2, 2, 1):
        muon, own, outer = said
        assert (
            "Muon is not known to work element by element, so 2 shards might not train as one "
            "does; use placement.shard_size 1"
        ) in muon
        assert "Own is not known" in own and "Own is not known" in outer
    assert run_on_ranks(refused, 2, 1, 2) == [["", "", ""]] * 2


@pytest.mark.parametrize(
    ("ranks", "workers", "sizes", "shape"),
    [
        (1, 1, (0, 1), (1, 1)),
        (4, 1, (0, 1), (4, 1)),
        (4, 1, (1, 0), (1, 4)),
        (4, 1, (2, 0), (2, 2)),
        (8, 2, (0, 2), (2, 2)),
        (1, 4, (1, 0), (1, 1)),
        (4, 4, (2, 1), (2, 1)),
    ],
)
def test_island_shapes(
    ranks: int, workers: int, sizes: tuple[int, int], shape: tuple[int, int]
) -> None:
    assert island_shape(ranks, workers, *sizes) == shape


@pytest.mark.parametrize(
    ("ranks", "workers", "sizes", "message"),
    [
        (3, 2, (1, 1), "3 ranks cannot share 2 workers; start at most 2 ranks, or ask.*workers$"),
        (
            2,
            1,
            (1, 1),
            "at most 1 rank, or ask for more workers, or for 2 ranks of each by placement",
        ),
        (
            3,
            4,
            (2, 1),
            (
                "3 ranks cannot share 4 workers with placement.shard_size 2 and "
                "placement.replica_size 1; start at most 8 ranks, a multiple of 2, or"
            ),
        ),
        (
            8,
            2,
            (2, 1),
            "start at most 4 ranks, a multiple of 2, or ask for more workers$",
        ),
        (
            1,
            1,
            (2, 2),
            "1 rank cannot share 1 worker with .*; start at most 4 ranks, a multiple of 4",
        ),
        (
            3,
            2,
            (1, 0),
            "3 ranks cannot share 2 workers with .*; start a multiple of 2 ranks, or ask",
        ),
        (3, 1, (2, 0), "3 ranks cannot share 1 worker with .*; start a multiple of 2 ranks"),
    ],
)
def test_ranks_that_cannot_hold_the_workers(
    ranks: int, workers: int, sizes: tuple[int, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        island_shape(ranks, workers, *sizes)


@pytest.mark.parametrize("workers", [0, [], [2, 0], [1, 1]])
def test_no_workers_and_ids_that_do_not_rise_cannot_be_placed(workers: Any) -> None:
    """None ended in a division by zero."""
    with pytest.raises(ValueError, match="cannot be placed; give one or more, as their number "):
        place(workers)


@pytest.mark.parametrize("sizes", [(0, 0), (-1, 1), (1, -1)])
def test_sizes_of_islands_that_cannot_be_meant(sizes: tuple[int, int]) -> None:
    """Of (0, 0) the advice was "a multiple of 1 ranks"; negative ones counted as none."""
    with pytest.raises(ValueError, match="must be >= 0, and one of them > 0, got "):
        place(2, "cpu", 0, *sizes)
