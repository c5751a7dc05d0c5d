"""What a plan considers."""

from dataclasses import replace
from pathlib import Path

import pytest

from adloco.config.recipe import build_recipe, read_values
from adloco.plan.candidates import candidates, ranks_of_island, smallest_worker_batch
from adloco.plan.cluster import Cluster

CLUSTER = Cluster(islands=8, bandwidth="100mbit", samples_per_second={8: 16.0})
ONE = [("method.sync_every", "50"), ("wire.format", "fp32")]


def test_data_parallel_training_has_no_trainers() -> None:
    trainers = [("method.num_trainers", count) for count in ("1", "2", "4")]
    found = candidates(["ddp", "diloco"], [*ONE, *trainers, ("batch.initial", "24")], CLUSTER)
    parallel, *others = found
    assert parallel.recipe.data_parallel and parallel.label == "ddp"
    assert parallel.recipe.guards.initial == 24
    assert [one.recipe.method.num_trainers for one in others] == [1, 2, 4]


@pytest.mark.parametrize(
    ("name", "settings", "rates", "expected"),
    [
        ("ddp", [], {8: 16.0, 32: 32.0}, 32),
        ("diloco", [], {8: 16.0, 32: 32.0, 64: 30.0}, 32),
        ("diloco", [], {4: 16.0, 8: 16.0}, 4),
        ("diloco", [("placement.replica_size", "4")], {8: 16.0, 32: 32.0}, 8),
        ("diloco", [("switch.max_micro_batch", "8")], {8: 16.0, 32: 32.0}, 8),
        ("adloco", [("batch.eta", "1.5")], {1: 4.0}, 2),
    ],
    ids=["ddp", "fastest", "smallest of the fastest", "of each rank", "given", "of the norm test"],
)
def test_micro_batches_are_those_of_the_fastest_pass(
    name: str, settings: list[tuple[str, str]], rates: dict[int, float], expected: int
) -> None:
    """A pass is over all ranks of an island; the norm test compares two samples of a worker."""
    cluster = Cluster(islands=8, bandwidth="100mbit", samples_per_second=rates)
    (one,) = candidates([name], [*ONE, *settings], cluster)
    assert one.recipe.switch.max_micro_batch == expected


def test_all_that_was_measured_of_an_island_trains(tmp_path: Path) -> None:
    """Passes of two ranks of an island, each with half of their samples."""
    cluster = Cluster(
        islands=8, bandwidth="100mbit", samples_per_second={8: 16.0, 32: 32.0}, ranks=2
    )
    parallel, local = candidates(["ddp", "diloco"], ONE, cluster)
    for one in (parallel, local):
        assert ranks_of_island(one.recipe, cluster) == 2
        assert one.recipe.switch.max_micro_batch == 16
        assert smallest_worker_batch(one.recipe, cluster) == 2
    assert local.recipe.placement.replica_size == 2
    for ranks, shards, replicas in ((2, 1, 2), (2, 2, 1), (4, 2, 2), (4, 0, 1)):
        island = replace(cluster, ranks=ranks)
        (one,) = candidates(["diloco"], [*ONE, ("placement.shard_size", str(shards))], island)
        assert one.recipe.placement.replica_size == replicas
        assert ranks_of_island(one.recipe, island) == ranks
    asked = [("placement.shard_size", "2"), ("placement.replica_size", "1")]
    (one,) = candidates(["diloco"], [*ONE, *asked], replace(cluster, ranks=4))
    assert one.recipe.placement.replica_size == 1
    asked = [("placement.shard_size", "3"), ("placement.replica_size", "0")]
    with pytest.raises(ValueError, match="no candidate is left"):
        candidates(["diloco"], [*ONE, *asked], replace(cluster, ranks=4))
    (one,) = candidates(["diloco"], [*ONE, ("placement.shard_size", "0")], CLUSTER)
    assert one.recipe.placement.replica_size == 1, "ranks that were not counted"
    own = tmp_path / "own.toml"
    for placement, ranks in (("shard_size = 2", 2), ("replica_size = 0", 2), ("shard_size = 4", 4)):
        own.write_text(f"[method]\nworkers_per_trainer = 8\n[placement]\n{placement}\n")
        (mine,) = candidates([str(own)], ONE, cluster)
        assert ranks_of_island(mine.recipe, cluster) == ranks
        assert mine.recipe.placement == build_recipe(read_values(str(own))).placement


def test_a_worker_alone_has_the_outer_steps_that_are_given() -> None:
    """It sends nothing, but an outer optimizer moves it as often, and as far, as these say."""
    alone = replace(CLUSTER, islands=1)
    given = [("method.sync_every", "50"), ("outer.lr", "0.5"), ("wire.format", "int4")]
    single, local = candidates(["single", "diloco"], given, alone)
    assert local.recipe.method.sync_every == 50
    assert local.recipe.outer.lr == 0.5  # type: ignore[attr-defined]
    for one, name in ((single, "single"), (local, "diloco")):
        assert one.label == name and one.recipe.wire == build_recipe(read_values(name)).wire
    (usual,) = candidates(["diloco"], [], alone)  # Nothing but a law could tell others apart.
    assert usual.recipe.outer == build_recipe(read_values("diloco")).outer
    with pytest.raises(ValueError, match="single trains one worker that never syncs, so it takes"):
        candidates(["single"], ONE, CLUSTER)


def test_an_eta_counts_if_the_batch_rule_is_given_too() -> None:
    etas = [("batch.eta", "0.4"), ("batch.eta", "1.6")]
    found = candidates(["diloco"], [*ONE, ("batch.rule", "norm-test"), *etas], CLUSTER)
    assert [one.recipe.batch.eta for one in found] == [0.4, 1.6]  # type: ignore[attr-defined]
    rule = [("batch.rule", "norm-test"), ("batch.estimator", "plug-in"), ("batch.eta", "1")]
    (one,) = candidates(["diloco"], [*ONE, *rule, *etas], CLUSTER)  # From 1 on it holds no batch.
    assert one.recipe.batch.eta == 0.4  # type: ignore[attr-defined]


def test_a_whole_model_in_flight_is_a_candidate_if_it_is_asked_for() -> None:
    in_flight = [*ONE, ("streaming.fragments", "1"), ("streaming.tau", "4")]
    (one,) = candidates(["diloco"], in_flight, CLUSTER)
    assert one.recipe.streaming.tau == 4
    several = [*ONE, ("streaming.fragments", "1"), ("streaming.fragments", "2")]
    found = [one.recipe.streaming for one in candidates(["diloco"], several, CLUSTER)]
    tried = [(each.fragments, each.tau) for each in found]
    assert tried == [(1, 0), (2, 0), (2, 1), (2, 2), (2, 4), (2, 8)]


def test_no_candidate_is_refused() -> None:
    with pytest.raises(ValueError, match="no candidate is left"):
        candidates(["diloco"], [*ONE, ("streaming.tau", "50")], CLUSTER)


def test_batches_that_follow_a_plan_of_their_own_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "seesaw.toml"
    file.write_text('[batch]\nrule = "seesaw"\n')
    ramp = [("batch.rule", "ramp"), ("batch.first", "4"), ("batch.last", "8")]
    for name, more in ((str(file), []), ("diloco", [("batch.rule", "seesaw")]), ("diloco", ramp)):
        with pytest.raises(ValueError, match="must be constant or norm-test, whose"):
            candidates([name], [*ONE, *more], CLUSTER)


def test_a_bf16_model_is_not_planned_with_what_a_run_refuses() -> None:
    """Workers mix their parameters while a fragment is in flight, which bf16 would round away."""
    given = [("model.dtype", "bf16"), ("method.sync_every", "50"), ("wire.format", "int4")]
    given += [("streaming.fragments", "4"), ("streaming.tau", "0"), ("streaming.tau", "2")]
    found = candidates(["diloco"], given, CLUSTER)
    assert {one.recipe.streaming.tau for one in found} == {0}


def test_a_worker_that_a_run_has_dropped_trains_on_its_island() -> None:
    (one,) = candidates(["diloco"], [*ONE, ("method.dropped", "[1]")], CLUSTER)
    assert one.recipe.method.living_workers == (*range(8),)
