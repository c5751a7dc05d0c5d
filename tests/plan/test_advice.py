"""The advice that follows from predictions."""

from adloco.plan.advice import choose
from adloco.plan.candidates import candidates
from adloco.plan.cluster import Cluster
from adloco.plan.prediction import Prediction, Workload, predict
from adloco.plan.target import Target


def chosen(loss_per_step: float) -> Prediction:
    """The choice between H = 10 and H = 20, which is a little faster."""
    cluster = Cluster(islands=8, bandwidth="10gbit", samples_per_second={8: 16.0})
    workload = Workload(parameters=1e6, tokens_per_sample=128, noise_scale=None)
    settings = [("method.sync_every", "10"), ("method.sync_every", "20"), ("wire.format", "fp32")]
    target = Target(
        name="tokens",
        tokens=lambda recipe, batch: 1e9,
        loss=lambda recipe, batch, tokens: 2 + loss_per_step * recipe.method.given_sync_every,
    )
    found = candidates(["diloco"], settings, cluster)
    return choose([predict(one, workload, cluster, target) for one in found])


def test_none_is_chosen_that_another_beats_in_time_and_loss() -> None:
    assert chosen(loss_per_step=0.01).sync_every == 10
    assert chosen(loss_per_step=0.0).sync_every == 10, "losses that are equal decide nothing"
    assert chosen(loss_per_step=-0.01).sync_every == 20
