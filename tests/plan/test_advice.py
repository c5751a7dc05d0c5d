"""The advice that follows from predictions."""

import math
from dataclasses import replace

from adloco.plan.advice import choose, find_crossing, reasons_for
from adloco.plan.candidates import candidates
from adloco.plan.cluster import Cluster
from adloco.plan.prediction import Prediction, Workload, predict
from adloco.plan.target import Target


def chosen(loss_per_step: float) -> int:
    """The choice between H = 10 and H = 20, which is a little faster."""
    cluster = Cluster(islands=8, bandwidth="10gbit", samples_per_second={8: 16.0})
    workload = Workload(parameters=1e6, tokens_per_sample=128, noise_scale=None)
    settings = [("method.sync_every", "10"), ("method.sync_every", "20"), ("wire.format", "fp32")]
    target = Target(
        name="tokens",
        tokens=lambda recipe, batch: 1e9,
        loss=lambda recipe, batch, tokens: 2 + loss_per_step * recipe.method.sync_every,
    )
    found = candidates(["diloco"], settings, cluster)
    best = choose([predict(one, workload, cluster, target) for one in found])
    return best.candidate.recipe.method.sync_every


def test_what_others_send_beside_a_candidate_that_sends_nothing() -> None:
    cluster = Cluster(islands=1, bandwidth="1gbit", samples_per_second={8: 16.0})
    workload = Workload(parameters=1e6, tokens_per_sample=128, noise_scale=None)
    target = Target(name="tokens", tokens=lambda recipe, batch: 1e6)
    found = [
        predict(one, workload, cluster, target)
        for one in candidates(["ddp", "single"], [], cluster)
    ]
    (_, beside) = reasons_for(found[0], found)
    assert beside.startswith("single takes as long; ")
    (_, beside) = reasons_for(found[0], [found[0], replace(found[1], bytes_sent=4e6)])
    assert "as long and sends 4e+06 bytes, where this one sends none; " in beside


def test_what_the_fastest_has_more_of() -> None:
    cluster = Cluster(islands=2, bandwidth="100mbit", samples_per_second={8: 16.0})
    workload = Workload(parameters=1e6, tokens_per_sample=128, noise_scale=None)
    target = Target(name="tokens", tokens=lambda recipe, batch: 1e6)
    settings = [("method.sync_every", every) for every in ("10", "20")]
    settings += [("wire.format", wire) for wire in ("fp32", "int2")]
    ddp, near, _, _, far = (
        predict(one, workload, cluster, target)
        for one in candidates(["ddp", "diloco"], settings, cluster)
    )
    other_batch = replace(ddp, seconds=0.97 * ddp.seconds, bytes_sent=2 * ddp.bytes_sent)
    assert reasons_for(ddp, [ddp, other_batch])[-1] == "ddp is 3.1% faster, but sends more bytes."
    assert reasons_for(near, [near, far])[-1].endswith(
        "% faster, but has more inner steps between syncs and sends fewer bits a value."
    )


def test_four_bits_are_preferred_to_more_and_steps_that_all_sync_to_both() -> None:
    workload = Workload(parameters=1e6, tokens_per_sample=128, noise_scale=None)
    target = Target(name="tokens", tokens=lambda recipe, batch: 1e6)
    cluster = Cluster(islands=2, bandwidth="1000gbit", samples_per_second={8: 16.0})
    formats = [("wire.format", name) for name in ("fp32", "int8", "int4", "int2")]
    found = [
        predict(one, workload, cluster, target)
        for one in candidates(["ddp", "diloco"], [("method.sync_every", "1"), *formats], cluster)
    ]
    assert choose(found).candidate.name == "ddp"
    best = choose([one for one in found if one.candidate.name == "diloco"])
    assert best.candidate.label.count("int4") == 1


def test_none_is_chosen_that_another_beats_in_time_and_loss() -> None:
    assert chosen(loss_per_step=0.01) == 10
    assert chosen(loss_per_step=0.0) == 10, "losses that are equal decide nothing"
    assert chosen(loss_per_step=-0.01) == 20


def test_a_candidate_within_five_percent_is_as_fast_and_a_slower_one_beats_none() -> None:
    cluster = Cluster(islands=2, bandwidth="100mbit", samples_per_second={8: 16.0})
    workload = Workload(parameters=1e6, tokens_per_sample=128, noise_scale=None)
    target = Target(name="tokens", tokens=lambda recipe, batch: 1e6)
    settings = [("method.sync_every", "10"), ("method.sync_every", "20"), ("wire.format", "fp32")]
    near, far = (
        predict(one, workload, cluster, target) for one in candidates(["diloco"], settings, cluster)
    )
    close, beyond = (replace(near, seconds=times * far.seconds) for times in (1.04, 1.06))
    assert choose([close, far]) is close and choose([beyond, far]) is far
    worse, slower = replace(near, loss=2.0), replace(far, loss=1.9, seconds=1.04 * near.seconds)
    assert choose([worse, slower]) is worse
    as_fast = replace(slower, seconds=near.seconds)
    assert choose([worse, as_fast]) is as_fast


def test_the_crossing_is_where_data_parallel_training_is_as_fast() -> None:
    """A step takes 0.5 s on each of 2 islands, and moves 4 MB for 0.32 s at 100 Mbit/s."""
    workload = Workload(parameters=1e6, tokens_per_sample=128, noise_scale=None)
    target = Target(name="tokens", tokens=lambda recipe, batch: 1e9)

    def crossing(*names: str, islands: int = 2, latency: str = "0ms") -> float | None:
        def predicted(bandwidth: float) -> list[Prediction]:
            on = Cluster(
                islands=islands,
                bandwidth=f"{bandwidth / 1e3:.6f}kbit",
                latency=latency,
                samples_per_second={8: 16.0},
            )
            found = candidates(names, [("method.sync_every", "100")], on)
            return [predict(one, workload, on, target) for one in found]

        return find_crossing(predicted)

    both = crossing("ddp", "diloco")
    assert both and 1e6 < both < 1e9
    assert crossing("ddp") is None and crossing("diloco") is None
    assert crossing("ddp", "diloco", islands=1) == 0
    assert crossing("ddp", "diloco", latency="1s") == math.inf
