"""What candidates take."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from adloco.config.recipe import build_recipe, override, read_values
from adloco.config.sections import Recipe
from adloco.plan.candidates import candidates
from adloco.plan.cluster import Cluster
from adloco.plan.cluster_plan import BANDWIDTHS, make_plan
from adloco.plan.gap_law import NORMAL_90, gap
from adloco.plan.loss_law import LossLaw
from adloco.plan.prediction import (
    Prediction,
    Workload,
    predict,
    trained_batch,
    with_spread,
)
from adloco.plan.short_runs import method_of
from adloco.plan.target import Target, loss_target, nearest_method, tokens_target

WORKLOAD = Workload(parameters=1e6, tokens_per_sample=128, noise_scale=20.0)
ONE = [("method.sync_every", "50"), ("wire.format", "fp32"), ("batch.eta", "1.5")]


def batch_of(name: str, islands: int, *settings: tuple[str, str]) -> float:
    cluster = Cluster(islands=islands, bandwidth="100mbit", samples_per_second={8: 16.0})
    (one,) = candidates([name], [*ONE, *settings], cluster)
    target = Target(name="tokens", tokens=lambda recipe, batch: 1e9)
    return predict(one, WORKLOAD, cluster, target).batch


def test_every_rank_has_a_sample() -> None:
    assert batch_of("diloco", 8) == 8
    assert batch_of("diloco", 8, ("placement.shard_size", "8")) == 64
    assert batch_of("ddp-norm", 64) == 64, "a rank needs no two groups, only its worker does"


def made(name: str, cluster: Cluster, *settings: tuple[str, str]) -> Prediction:
    (one,) = candidates([name], [*dict([*ONE, *settings]).items()], cluster)
    target = Target(name="tokens", tokens=lambda recipe, batch: 128e3)
    return predict(one, WORKLOAD, cluster, target)


def test_diloco_by_hand() -> None:
    """1,000 samples in batches of 8 are 125 steps and 2.5 syncs. Two islands take 4 samples each in
    0.25 s, so 50 steps take 12.5 s; a sync of 4 MB leaves each in 0.32 s.
    """
    cluster = Cluster(islands=2, bandwidth="100mbit", samples_per_second={4: 16.0, 8: 16.0})
    found = made("diloco", cluster)
    assert (found.batch, found.inner_steps, found.syncs) == (8, 125, 2.5)
    assert found.bytes_sent == 2.5 * 4e6
    assert found.seconds == pytest.approx(2.5 * (12.5 + 0.32))


def test_a_run_that_is_shorter_than_a_round_syncs_once() -> None:
    """125 steps of 0.25 s, and a sync of 4 MB."""
    cluster = Cluster(islands=2, bandwidth="100mbit", samples_per_second={4: 16.0, 8: 16.0})
    found = made("diloco", cluster, ("method.sync_every", "500"))
    assert (found.syncs, found.bytes_sent) == (1, 4e6)
    assert found.seconds == pytest.approx(125 * 0.25 + 0.32)


def test_fragments_leave_beside_steps() -> None:
    """Two fragments of 2 MB take 1.6 s each, 1 s of it beside four steps of 0.25 s."""
    cluster = Cluster(islands=2, bandwidth="10mbit", samples_per_second={4: 16.0})
    found = made("diloco", cluster, ("streaming.fragments", "2"), ("streaming.tau", "4"))
    assert found.round.transfer == pytest.approx(2 * 0.6)


def test_a_plan_names_the_measured_micro_batch() -> None:
    """64 samples on two islands are one pass of 32 each in 1 s, not four of 8 in 0.5 s each."""
    cluster = Cluster(islands=2, bandwidth="1gbit", samples_per_second={8: 16.0, 32: 32.0})
    found = candidates(["diloco"], [*ONE, ("batch.initial", "64")], cluster)
    target = Target(name="tokens", tokens=lambda recipe, batch: 1e9)
    plan = make_plan(found, WORKLOAD, cluster, target)
    assert plan.chosen.step_seconds == (1.0, 1.0)
    said = " ".join(plan.reasons)
    assert "32 samples in a step on average, in micro-batches of at most 32 on each rank" in said
    assert "and trains 32 a second; of the passes" in said


def test_a_busy_machine_is_said_first() -> None:
    target = Target(name="tokens", tokens=lambda recipe, batch: 1e9)
    for jitter, said in ((0.91, True), (0.1, False)):
        cluster = Cluster(islands=2, bandwidth="1gbit", samples_per_second={8: 16.0}, jitter=jitter)
        plan = make_plan(candidates(["diloco"], ONE, cluster), WORKLOAD, cluster, target)
        assert plan.reasons[0].startswith("Steps were measured with a jitter of") == said


def test_shares_by_speed_by_hand() -> None:
    """Of 12 samples islands of speeds 1 and 0.5 take 6 each, in 0.5 and 1 s, or 8 and 4, in 2/3 s
    both.
    """
    cluster = Cluster(islands=2, bandwidth="1gbit", samples_per_second={1: 12.0}, speeds=(1, 0.5))
    whole = ("switch.max_micro_batch", "12"), ("batch.initial", "12")
    equal = made("diloco", cluster, *whole)
    assert equal.step_seconds == pytest.approx((0.5, 1.0))
    assert equal.round.waiting == pytest.approx(50 * 0.25)
    by_speed = made("diloco", cluster, *whole, ("placement.balance", "speed"))
    assert by_speed.step_seconds == pytest.approx((2 / 3, 2 / 3))
    assert by_speed.round.waiting == pytest.approx(0, abs=1e-9)
    small = made(
        "diloco",
        replace(cluster, speeds=(1, 0.1)),
        *whole[:1],
        ("batch.initial", "2"),
        ("placement.balance", "speed"),
    )
    assert small.step_seconds == pytest.approx((1 / 12, 1 / 1.2)), "nobody takes no sample"


def test_the_slowest_rank_of_data_parallel_training_decides() -> None:
    """Of 10 samples on 4 islands, two take 3; of 8 ranks on them, two take 2, as if all did."""
    for ranks, samples in ((1, 3), (2, 4)):
        cluster = Cluster(islands=4, ranks=ranks, bandwidth="1gbit", samples_per_second={1: 12.0})
        settings = ("batch.initial", "10"), ("switch.max_micro_batch", "8")
        assert made("ddp", cluster, *settings).step_seconds == pytest.approx((samples / 12,) * 4)


def test_shares_of_each_trainer_by_hand() -> None:
    """Two trainers of two islands split 12 samples each; nobody takes more than 8."""
    speeds = (1.0, 0.5, 0.2, 1.0)
    cluster = Cluster(islands=4, bandwidth="1gbit", samples_per_second={1: 12.0}, speeds=speeds)
    settings = [("switch.max_micro_batch", "8"), ("switch.mode", "switch")]
    settings += [("batch.initial", "12"), ("method.num_trainers", "2")]
    found = made("diloco", cluster, *settings, ("placement.balance", "speed"))
    assert found.step_seconds == pytest.approx((8 / 12, 4 / 6, 4 / 2.4, 8 / 12))
    assert found.inner_steps == pytest.approx(1000 / 12 / 2), "1,000 samples of both"


def test_one_island_never_syncs() -> None:
    cluster = Cluster(islands=1, bandwidth="1kbit", samples_per_second={8: 16.0})
    for name in ("ddp", "diloco", "single"):
        assert made(name, cluster).seconds == pytest.approx(1000 / 16)
        assert (made(name, cluster).syncs, made(name, cluster).bytes_sent) == (0, 0)


def test_without_limit_of_the_link_data_parallel_training_is_chosen() -> None:
    cluster = Cluster(islands=4, bandwidth="1000000gbit", samples_per_second={2: 16.0})
    found = candidates(["diloco", "ddp"], [], cluster)
    target = tokens_target(found, parameters=1e6, noise_scale=None)
    workload = Workload(parameters=1e6, tokens_per_sample=128, noise_scale=None)
    plan = make_plan(found, workload, cluster, target)
    assert plan.chosen.candidate.name == "ddp"
    assert plan.condition == " with batches of 8 samples only"
    assert "The noise scale is missing" in plan.reasons[0]
    known = tokens_target(found, parameters=1e6, noise_scale=20.0)
    assert not make_plan(found, WORKLOAD, cluster, known).condition


def test_equal_progress() -> None:
    """With B = 8, a batch of 16 needs (1 + 2) / (1 + 1) times the tokens of 8, and local steps what
    the law of the gap says.
    """
    cluster = Cluster(islands=2, bandwidth="1gbit", samples_per_second={8: 16.0})
    found = candidates(["ddp", "diloco"], [*ONE, ("run.tokens", "1000")], cluster, try_batches=True)
    target = tokens_target(found, parameters=1e6, noise_scale=8.0)
    ddp, diloco = found[0].recipe, found[-1].recipe
    assert target.tokens(ddp, 8) == 1000
    assert target.tokens(ddp, 16) == 1500
    of_round = 16 * diloco.data.context_tokens * 50
    needed = target.tokens(diloco, 16)
    behind = gap(1e6, 2, needed / of_round)  # After the tokens that it needs, not after the budget.
    assert needed == pytest.approx(1500 * behind.times_tokens())
    assert target.interval is not None
    low, high = target.interval(diloco, 16)
    assert 1500 < low < needed < high
    assert low == pytest.approx(1500 * gap(1e6, 2, low / of_round).times_tokens(-NORMAL_90))
    assert target.interval(ddp, 8) is None
    parallel, local = (
        with_spread(predict(found[at], WORKLOAD, cluster, target), target) for at in (0, -1)
    )
    between = target.interval(diloco, local.batch)
    assert local.spread and between
    assert [times * local.tokens for times in local.spread] == pytest.approx(between)
    assert parallel.spread is None
    spreads = (None, (1.0, 1.0), (0.99, 1.0), (1.0, 1.01))
    assert [replace(local, spread=each).varies for each in spreads] == [False, False, True, True]


def test_the_target_has_a_batch_of_data_parallel_training() -> None:
    """AdLoCo begins with 4 samples a step, data-parallel training with 8."""
    cluster = Cluster(islands=2, bandwidth="1gbit", samples_per_second={8: 16.0})
    for names, samples in ((["ddp", "adloco"], 8), (["adloco"], 4)):
        found = candidates(names, [*ONE, ("run.tokens", "1000")], cluster)
        target = tokens_target(found, parameters=1e6, noise_scale=8.0)
        assert target.name.endswith(f"data-parallel training with {samples} samples a step")


def test_trainers_that_merge_count_as_the_one_that_they_become() -> None:
    """However many begin, all workers of eight islands sync with one another in the end. Trainers
    that never merge make the progress each by itself, with as many workers as each has.
    """
    cluster = Cluster(islands=8, bandwidth="1gbit", samples_per_second={8: 16.0})
    budget = [*ONE, ("run.tokens", "100000000"), ("batch.initial", "16")]
    budget += [("method.num_trainers", trainers) for trainers in ("1", "2", "4")]
    found = candidates(["diloco"], [*budget, ("merge.policy", "smallest")], cluster)
    target = tokens_target(found, parameters=1e6, noise_scale=8.0)
    assert len({predict(one, WORKLOAD, cluster, target).tokens for one in found}) == 1
    said = "Trainers that never merge make the progress each by itself."
    assert said not in target.assumptions
    apart = candidates(["diloco"], budget, cluster)
    assert said in tokens_target(apart, parameters=1e6, noise_scale=8.0).assumptions
    of_round = 16 * apart[0].recipe.data.context_tokens * 50
    for one, trainers in zip(apart, (1, 2, 4), strict=True):
        needed = target.tokens(one.recipe, 16)
        behind = gap(1e6, 8 // trainers, needed / trainers / of_round)
        assert needed == pytest.approx(trainers * 1e8 * behind.times_tokens())


def test_only_batches_that_are_trained_are_named() -> None:
    """On 16 islands the recipe's 8 samples a step become 16, one on each."""
    cluster = Cluster(islands=16, bandwidth="1gbit", samples_per_second={8: 16.0})
    found = candidates(["ddp", "diloco"], [*ONE, ("run.tokens", "1000")], cluster)
    target = tokens_target(found, parameters=1e6, noise_scale=None)
    assert target.name == "the progress that 1,000 tokens make in data-parallel training"
    workload = Workload(parameters=1e6, tokens_per_sample=128, noise_scale=None)
    plan = make_plan(found, workload, cluster, target)
    assert plan.condition == " with batches of 16 samples only"


def test_what_fits_no_island_is_refused() -> None:
    cluster = Cluster(islands=2, bandwidth="1gbit", samples_per_second={8: 16.0}, memory_gib=0.01)
    found = candidates(["ddp"], [], cluster)
    target = Target(name="tokens", tokens=lambda recipe, batch: 1e9)
    with pytest.raises(ValueError, match="no candidate fits in the 0.01 GiB of an island"):
        make_plan(found, WORKLOAD, cluster, target)


@pytest.mark.parametrize(
    ("settings", "copies"),
    [
        # Parameters, gradients, two moments; global parameters and their momentum.
        ((), 6),
        ((("inner.optimizer", "sgd"),), 5),
        ((("inner.optimizer", "sgd"), ("inner.momentum", "0")), 4),
        ((("wire.format", "int4"), ("wire.feedback", "params")), 7),
        ((("outer.on_host", "true"),), 4),
        ((("outer.on_host", "true"), ("wire.format", "int4"), ("wire.feedback", "params")), 4),
        ((("model.dtype", "bf16"), ("wire.format", "int4"), ("wire.feedback", "params")), 5.5),
        ((("placement.shard_size", "2"),), 6),
        ((("placement.replica_size", "2"),), 12),
        # Every rank has the global parameters of all trainers.
        ((("method.num_trainers", "2"),), 8),
        ((("outer.update", "mean"),), 5),
        ((("outer.options", "{}"),), 5),
        ((("outer.optimizer", "Adam"), ("outer.options", "{}")), 7),
    ],
)
def test_memory_of_an_island(settings: tuple[tuple[str, str], ...], copies: float) -> None:
    """In copies of a million parameters in fp32. Residuals and global parameters are in fp32 in a
    bf16 model, too.
    """
    cluster = Cluster(islands=2, bandwidth="100mbit", samples_per_second={8: 16.0})
    found = made("diloco", cluster, ("inner.optimizer", "muon"), *settings)
    assert found.memory_bytes == 4e6 * copies


def recipe(name: str, *settings: tuple[str, str]) -> Recipe:
    return build_recipe(override(read_values(name), list(settings)))


@pytest.mark.parametrize(
    ("shards", "replicas", "copies", "sent"),
    [
        # Four islands of eight ranks. All ranks have one copy: 3 x 3/4 in each of two passes.
        ("0", "1", 1 / 4, 2 * 3 * 3 / 4),
        # A copy in each island: the ring of the gradients alone.
        ("8", "4", 1, 2 * 3 / 4),
        ("2", "0", 4, 2 * 3 / 4),
        ("1", "0", 8, 2 * 3 / 4),
        # A copy in two islands each, and half of it in each of two rings between them.
        ("16", "2", 1 / 2, 2 * 3 * 1 / 2 + 1 / 2),
    ],
)
def test_shards_of_data_parallel_training(
    shards: str, replicas: str, copies: float, sent: float
) -> None:
    """In copies of a million parameters in fp32, with gradients, AdamW's two moments and global
    parameters.
    """
    cluster = Cluster(islands=4, ranks=8, bandwidth="1gbit", samples_per_second={64: 16.0})
    shape = (("placement.shard_size", shards), ("placement.replica_size", replicas))
    batch = (("batch.initial", "512"), ("switch.max_micro_batch", "8"), ("run.tokens", "100000"))
    found = made("ddp", cluster, ("inner.optimizer", "adamw"), *batch, *shape)
    assert found.memory_bytes == 4e6 * 5 * copies
    assert found.bytes_sent == pytest.approx(4e6 * sent * found.syncs)


@pytest.mark.parametrize(
    ("name", "shape", "ranks", "islands", "copies"),
    [
        # The file does not say how many ranks an island has: as many as the shape needs.
        ("ddp", ("8", "1"), 0, 4, 1 / 4),
        ("ddp", ("1", "8"), 0, 2, 4),
        ("single", ("8", "1"), 0, 1, 1),
        ("fsdp-norm", ("0", "1"), 1, 3, 1 / 3),
        # Shards that take a part of an island, and ranks that no shape divides.
        ("ddp", ("12", "0"), 8, 3, None),
        ("ddp", ("4", "0"), 6, 2, None),
        ("ddp", ("1", "2"), 1, 4, None),
    ],
)
def test_shapes_that_fit_on_the_islands(
    name: str, shape: tuple[str, str], ranks: int, islands: int, copies: float | None
) -> None:
    cluster = Cluster(
        islands=islands, ranks=ranks, bandwidth="1gbit", samples_per_second={64: 16.0}
    )
    settings = [("placement.shard_size", shape[0]), ("placement.replica_size", shape[1])]
    settings += [("inner.optimizer", "adamw"), ("batch.initial", "64"), ("batch.maximum", "64")]
    settings += [("switch.max_micro_batch", "8"), ("batch.minimum", "64")]
    if copies is None:
        with pytest.raises(ValueError, match="shards and replicas must fit on islands"):
            made(name, cluster, *settings)
    else:
        assert made(name, cluster, *settings).memory_bytes == pytest.approx(4e6 * 5 * copies)


def test_all_ranks_of_an_island_can_share_a_worker() -> None:
    cluster = Cluster(islands=2, ranks=8, bandwidth="1gbit", samples_per_second={8: 16.0})
    for shards in ("0", "8"):
        found = made(
            "diloco", cluster, ("inner.optimizer", "muon"), ("placement.shard_size", shards)
        )
        assert found.memory_bytes == 4e6 * 6


@pytest.mark.parametrize(
    ("name", "ranks", "copies"), [("ddp", 0, 5), ("ddp", 2, 10), ("fsdp-norm", 2, 2.5)]
)
def test_memory_of_an_island_of_data_parallel_training(
    name: str, ranks: int, copies: float
) -> None:
    """Each rank has parameters, gradients, two moments and global parameters, or all ranks of both
    islands have them.
    """
    cluster = Cluster(islands=2, bandwidth="1gbit", samples_per_second={8: 16.0}, ranks=ranks)
    found = made(name, cluster, ("inner.optimizer", "muon"))
    assert found.memory_bytes == 4e6 * copies


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("ddp-norm", ()),
        ("diloco", (("switch.mode", "never"), ("switch.max_micro_batch", "2"))),
        ("diloco", ()),
    ],
)
def test_without_a_target_the_first_candidate_needs_its_budget(
    name: str, settings: tuple[tuple[str, str], ...]
) -> None:
    """Its loss is that of the batch that it trains, by the norm test or cut by its memory."""
    cluster = Cluster(islands=4, bandwidth="1gbit", samples_per_second={8: 16.0})
    budget = [*dict([*ONE, ("batch.initial", "32"), ("run.tokens", "40000"), *settings]).items()]
    found = candidates([name], budget, cluster)
    law = LossLaw(
        irreducible=0.1,
        scale=30.0,
        exponent=0.3,
        critical_batch=20.0,
        methods={method_of(found[0].recipe): 1.0},
        sync_exponent=0.1,
    )
    fit: Any = SimpleNamespace(law=law, assumptions=(), runs=None, longest=None)
    target = loss_target(found, fit, None, trained_batch(found[0], WORKLOAD, cluster))
    assert predict(found[0], WORKLOAD, cluster, target).tokens == pytest.approx(40000)


def test_several_workers_are_nearest_to_several() -> None:
    measured = {method_of(recipe(name)): 1.0 for name in ("ddp", "local-sgd")}
    many = recipe("local-sgd", ("method.workers_per_trainer", "8"))
    assert nearest_method(many, measured)[0] == method_of(recipe("local-sgd"))
    assert nearest_method(recipe("ddp"), measured)[0] == method_of(recipe("ddp"))


def test_what_no_run_has_is_named() -> None:
    """Also a setting that is changed in the runs alone, or the other options of an optimizer."""
    options = ("outer.options", "{ momentum = 0.5, nesterov = true }")
    changed = recipe("diloco", ("outer.lr", "0.5"), options, ("wire.format", "int4"))
    measured = {method_of(changed): 1.0}
    assert nearest_method(changed, measured)[1] == []
    assert nearest_method(recipe("diloco", ("wire.format", "fp32")), measured)[1] == [
        "outer.options {'momentum': 0.6, 'nesterov': True}",
        "wire.format fp32",
        "without outer.lr 0.5",
    ]


def test_trainers_that_never_merge_need_a_run_of_their_own() -> None:
    """A law of runs with one trainer does not say what several need."""
    cluster = Cluster(islands=4, bandwidth="1gbit", samples_per_second={8: 16.0})
    several = [*ONE, ("run.tokens", "1000"), ("method.num_trainers", "2")]
    found = candidates(["diloco"], several, cluster)
    fit: Any = SimpleNamespace(law=SimpleNamespace(methods={method_of(recipe("diloco")): 1.0}))
    with pytest.raises(ValueError, match="has 2 trainers that never merge, and no run of --runs"):
        loss_target(found, fit, 2.0, 8)
    fit.law.methods[method_of(found[0].recipe)] = 1.0
    fit.assumptions, fit.runs, fit.longest = (), None, None
    assert loss_target(found, fit, 2.0, 8).name == "a loss of 2"


def test_more_islands_than_the_largest_batch_take_a_sample_each() -> None:
    assert batch_of("diloco", 16, ("batch.maximum", "8")) == 16


def test_what_does_not_fit_in_memory_is_no_candidate() -> None:
    target = Target(name="tokens", tokens=lambda recipe, batch: 1e9)
    cluster = Cluster(islands=2, bandwidth="1gbit", samples_per_second={8: 16.0})
    small = min(made(name, cluster).memory_bytes for name in ("ddp", "diloco"))
    room = replace(cluster, memory_gib=small / 2**30)
    plan = make_plan(candidates(["ddp", "diloco"], ONE, room), WORKLOAD, room, target)
    assert [one.memory_bytes for one in plan.predictions] == [small]
    assert plan.crossing is None, "it crosses no curve either"


def test_curves_have_the_fastest_of_each_method() -> None:
    """The recommended one may take a twentieth longer."""
    cluster = Cluster(islands=2, bandwidth="1gbit", samples_per_second={8: 16.0})
    every = [("method.sync_every", each) for each in ("10", "12")]
    found = candidates(["ddp", "diloco"], every, cluster)
    target = Target(name="tokens", tokens=lambda recipe, batch: 1e9)
    plan = make_plan(found, WORKLOAD, cluster, target)
    assert (BANDWIDTHS[0], BANDWIDTHS[-1]) == (1e6, 1e11)
    for name, line in plan.over_bandwidth.items():
        for bits, one in zip(BANDWIDTHS, line, strict=True):
            on = replace(cluster, bandwidth=f"{bits / 1e3:.6f}kbit")
            of_name = [each for each in found if each.name == name]
            assert one.seconds == min(predict(e, WORKLOAD, on, target).seconds for e in of_name)


def test_gradients_have_the_type_of_the_parameters() -> None:
    cluster = Cluster(islands=2, bandwidth="1gbit", samples_per_second={8: 16.0})
    half, whole = made("ddp", cluster, ("model.dtype", "bf16")), made("ddp", cluster)
    assert half.bytes_sent == whole.bytes_sent / 2


def test_a_merge_takes_the_time_of_its_bytes() -> None:
    """Parameters, 4 MB, once around the ring of four: 6 MB; its outer step has no momentum."""
    cluster = Cluster(islands=4, bandwidth="8mbit", samples_per_second={8: 16.0})
    found = made("adloco", cluster, ("method.num_trainers", "2"))
    merged = 1.5 * 4e6
    assert found.bytes_sent == pytest.approx(found.syncs * 1.5 * 4e6 + merged)
    assert found.seconds == pytest.approx(found.inner_steps / 50 * found.round.total + merged / 1e6)
    for options, times in (("{ momentum = 0.5 }", 2), ("{}", 1)):
        two = ("method.num_trainers", "2"), ("merge.policy", "smallest"), ("outer.options", options)
        found = made("diloco", cluster, *two)
        assert found.bytes_sent == pytest.approx(found.syncs * 1.5 * 4e6 + times * merged)
    for count, merges in (("4", 1), ("3", 2), ("2", 3)):
        four = ("method.num_trainers", "4"), ("merge.count", count)
        found = made("adloco", cluster, *four)
        assert found.bytes_sent == pytest.approx(found.syncs * 1.5 * 4e6 + merges * merged)


def test_what_short_formats_send() -> None:
    """In 1 bit, 34 bytes of a block of 256 values for each of 2.5 syncs. Two trainers of two
    workers send parameters in a merge, in 260 bytes a block of 256.
    """
    bits = ("wire.format", "int1")
    two, four = (
        Cluster(islands=islands, bandwidth="8mbit", samples_per_second={8: 16.0})
        for islands in (2, 4)
    )
    found = made("diloco", two, bits)
    assert found.bytes_sent == pytest.approx(2.5 * 1e6 * 34 / 256)
    assert found.seconds == pytest.approx(2.5 * found.round.total)
    found = made("adloco", four, bits, ("method.num_trainers", "2"))
    syncs = found.syncs * 1.5 * 1e6 * 34 / 256
    assert found.bytes_sent == pytest.approx(syncs + 1.5 * 1e6 * 260 / 256)


def test_the_plug_in_form_holds_a_smaller_batch() -> None:
    """A noise scale of 20 at eta = 0.5: 20 (4 - 1) samples, and without bias 20 x 4."""
    cluster = Cluster(islands=2, bandwidth="1gbit", samples_per_second={8: 16.0})
    for estimator, batch in (("plug-in", 60), ("unbiased", 80)):
        settings = ("batch.eta", "0.5"), ("batch.estimator", estimator)
        assert made("adloco", cluster, *settings, ("batch.maximum", "99")).batch == batch
        assert made("adloco", cluster, *settings, ("batch.maximum", "50")).batch == 50
        guards = ("batch.minimum", "90"), ("batch.initial", "90"), ("batch.maximum", "99")
        assert made("adloco", cluster, *settings, *guards).batch == 90
    assert made("adloco", cluster, ("batch.eta", "1.5")).batch == math.ceil(20 / 1.5**2)
    two = replace(cluster, ranks=2)
    clipped = ("batch.initial", "32"), ("switch.mode", "never"), ("switch.max_micro_batch", "2")
    assert made("diloco", two, *clipped).batch == 8, "two on each rank"


def test_a_batch_below_the_smallest_makes_no_progress_for_free() -> None:
    cluster = Cluster(islands=2, bandwidth="1gbit", samples_per_second={8: 16.0})
    found = candidates(["ddp"], ONE, cluster)
    target = tokens_target(found, parameters=1e6, noise_scale=20.0)
    assert target.tokens(found[0].recipe, 1.0) == found[0].recipe.run.tokens
