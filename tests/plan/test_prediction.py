"""What candidates take."""

from adloco.config.recipe import build_recipe, override, read_values
from adloco.config.sections import Recipe
from adloco.plan.candidates import candidates
from adloco.plan.cluster import Cluster
from adloco.plan.prediction import Workload, predict
from adloco.plan.short_runs import method_of
from adloco.plan.target import Target, nearest_method

WORKLOAD = Workload(parameters=1e6, tokens_per_sample=128, noise_scale=20.0)
ONE = [("method.sync_every", "50"), ("wire.format", "fp32")]


def batch_of(name: str, islands: int, *settings: tuple[str, str]) -> float:
    cluster = Cluster(islands=islands, bandwidth="100mbit", samples_per_second={8: 16.0})
    (one,) = candidates([name], [*ONE, *settings], cluster)
    target = Target(name="tokens", tokens=lambda recipe, batch: 1e9)
    return predict(one, WORKLOAD, cluster, target).batch


def test_every_rank_has_a_sample() -> None:
    assert batch_of("diloco", 8) == 8
    assert batch_of("diloco", 8, ("placement.shard_size", "8")) == 64
    assert batch_of("ddp-norm", 64) == 64, "a rank needs no two groups, only its worker does"


def recipe(name: str, *settings: tuple[str, str]) -> Recipe:
    return build_recipe(override(read_values(name), list(settings)))


def test_several_workers_are_nearest_to_several() -> None:
    measured = {method_of(recipe(name)): 1.0 for name in ("ddp", "local-sgd")}
    many = recipe("local-sgd", ("method.workers_per_trainer", "8"))
    assert nearest_method(many, measured)[0] == method_of(recipe("local-sgd"))
    assert nearest_method(recipe("ddp"), measured)[0] == method_of(recipe("ddp"))
