"""Dropout from generators of the workers' own: rates, masks, and runs that draw alike on every
placement and after a resume.
"""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from adloco import AdLoCo, BatchGuards, NormTest, OneProcess, SwitchMode
from adloco.algorithms.dropout import mixed_seed, own_dropout, recomputed_alike, uses_dropout
from adloco.distributed.dtensor import gather_shards
from adloco.distributed.launch.launcher import place
from adloco.distributed.testing import run_on_ranks
from tests.problems import adamw, cases, make_run, params_of, tokens

CPU = torch.device("cpu")


def test_rate_scale_and_draws() -> None:
    ones = torch.ones(100_000)
    dropped = []
    for seed, stream, position in ((7, 0, 0), (7, 0, 0), (8, 0, 0), (7, 1, 0), (7, 0, 1)):
        torch.rand(stream + position + 1)  # Others' draws change nothing.
        with own_dropout(seed, stream, position, CPU):
            dropped.append(nn.functional.dropout(ones, 0.25))
    first, again, *others = dropped
    assert first.unique().tolist() == [0.0, pytest.approx(1 / 0.75)]
    assert float((first == 0).float().mean()) == pytest.approx(0.25, abs=0.006)
    assert first.equal(again)
    # Where two draws are independent, both drop a sixteenth.
    for other in others:
        assert float(((first == 0) & (other == 0)).float().mean()) == pytest.approx(
            0.0625, abs=0.004
        )
    assert len({mixed_seed(*parts) for parts in ((1, 11), (11, 1), (1, 1, 1), (111,))}) == 4


def test_nothing_is_dropped_in_evaluation() -> None:
    module, inputs = nn.Dropout(0.9).eval(), torch.randn(5)
    with own_dropout(0, 0, 0, CPU):
        assert module(inputs).equal(inputs)


@pytest.mark.parametrize(
    "how", [{}, {"is_causal": True}, {"scale": 0.3}, {"attn_mask": "bool"}, {"attn_mask": "float"}]
)
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_attention_is_the_fused_operator_s(how: dict[str, Any], kv_heads: int) -> None:
    """If the rate is so small that nothing is dropped, the output equals the fused operator's."""
    torch.manual_seed(0)
    query, key, value = (
        torch.randn(3, 4, 5, 8),
        torch.randn(3, kv_heads, 5, 8),
        torch.randn(3, kv_heads, 5, 8),
    )
    masks = {"bool": torch.rand(3, 1, 5, 5) > 0.3, "float": torch.randn(3, 1, 5, 5)}
    masks["bool"][..., 0] = True
    settings = {
        name: masks[value] if name == "attn_mask" else value for name, value in how.items()
    } | {"enable_gqa": kv_heads < 4}
    with own_dropout(0, 0, 0, CPU):
        mine = nn.functional.scaled_dot_product_attention(
            query, key, value, dropout_p=1e-12, **settings
        )
    torch.testing.assert_close(
        mine, nn.functional.scaled_dot_product_attention(query, key, value, **settings)
    )


def test_everything_dropped_and_nothing_to_attend_to_are_zeros() -> None:
    query = torch.randn(1, 1, 3, 4, generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[True, False, False], [False, False, False], [True, True, True]])
    with own_dropout(0, 0, 0, CPU):
        assert nn.functional.dropout(torch.ones(4), 1.0).tolist() == [0.0] * 4
        mine = nn.functional.scaled_dot_product_attention(
            query, query, query, attn_mask=mask, dropout_p=1e-12
        )
    torch.testing.assert_close(
        mine, nn.functional.scaled_dot_product_attention(query, query, query, attn_mask=mask)
    )


def test_attention_weights_are_dropped() -> None:
    value, seen = torch.eye(400).expand(1, 1, 400, 400), []
    for _ in range(2):
        with own_dropout(0, 0, 0, CPU):
            weights = nn.functional.scaled_dot_product_attention(
                torch.zeros(1, 1, 400, 8), torch.zeros(1, 1, 400, 8), value, dropout_p=0.5
            )
        seen.append(weights)
    assert float((weights == 0).float().mean()) == pytest.approx(0.5, abs=0.01)
    assert float(weights.sum(-1).mean()) == pytest.approx(1.0, abs=0.01)
    assert seen[0].equal(seen[1])


def test_what_is_computed_again_draws_the_same() -> None:
    """It draws from the generator of its own, too, in both passes."""
    outputs = []
    for _ in range(2):
        inputs = torch.ones(1000, requires_grad=True)
        with own_dropout(0, 0, 0, CPU):
            nn.functional.dropout(torch.ones(3))
            output = torch.utils.checkpoint.checkpoint(
                lambda x: nn.functional.dropout(x, 0.5) * x,
                inputs,
                use_reentrant=False,
                context_fn=recomputed_alike,
            )
            after = nn.functional.dropout(torch.ones(1000), 0.5)
        output.sum().backward()
        outputs.append(output.detach())
        assert inputs.grad is not None
        assert inputs.grad.equal(2 * outputs[-1])
        assert not after.equal(outputs[-1])
    assert outputs[0].equal(outputs[1])


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Embedding(7, 12), nn.Dropout(0.3), nn.Linear(12, 7)).double()

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.layers(ids)
        return logits


def loss(model: Any, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def dropping(placement: Any = None, **changes: Any) -> AdLoCo:
    settings = {
        "build_model": Dropping,
        "loss_fn": loss,
        "data": tokens(500, 4),
        "num_trainers": 2,
        "inner": adamw(0.01),
        "guards": BatchGuards(initial=8, minimum=8, maximum=8),
        "switch": SwitchMode(max_micro_batch=2, mode="always"),
        "batch": NormTest(),
    }
    placed = {"placement": placement} if placement else {}
    return make_run(**settings | placed | changes)


def test_whether_a_model_drops() -> None:
    assert uses_dropout(Dropping())
    assert uses_dropout(nn.MultiheadAttention(4, 2, dropout=0.1))
    assert not uses_dropout(nn.Sequential(nn.Dropout(0.0), nn.LayerNorm(2)))
    own = nn.Linear(2, 2)
    own.hidden_dropout = 0.2  # A rate that a model hands to the function itself.
    assert uses_dropout(own)


def test_threads_and_resumes_draw_alike() -> None:
    one, two, resumed = dropping(OneProcess(threads=1)), dropping(OneProcess(threads=2)), dropping()
    for run in (one, two):
        list(run.rounds(2))
    resumed.load_state_dict(copy.deepcopy(one.state_dict()))
    for run in (one, two, resumed):
        torch.rand(3)
        list(run.rounds(2))
        assert params_of(run, 1).equal(params_of(one, 1))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_of_a_model_s_own_drops_the_same_twice(reentrant: bool) -> None:
    """Its second pass runs in the backward pass, where only torch's generator is set back."""
    torch.manual_seed(0)
    layer, inputs = nn.Linear(5, 64), torch.randn(3, 5, requires_grad=True)

    def block(x: Tensor) -> Tensor:
        return nn.functional.dropout(layer(x), 0.5)

    with own_dropout(0, 0, 0, CPU):
        output = checkpoint(block, inputs, use_reentrant=reentrant)
    output.sum().backward()
    kept = 2.0 * (output.detach() != 0)
    torch.testing.assert_close(layer.weight.grad, kept.T @ inputs.detach())


def on_ranks(shards: int, replicas: int) -> Tensor:
    run = dropping(place(4, CPU, 1, shards, replicas))
    list(run.rounds(2))
    return (
        torch.cat(
            [
                tensor.flatten()
                for tensor in gather_shards(list(run.trainers[1].outer.global_params))
            ]
        )
        .detach()
        .clone()
    )


@pytest.mark.parametrize(
    ("ranks", "shards", "replicas"),
    cases(
        {"2 ranks": (2, 1, 1), "replicas": (2, 1, 2), "shards": (2, 2, 1)},
        default=("2 ranks", "shards"),
    ),
)
def test_ranks_draw_alike(ranks: int, shards: int, replicas: int) -> None:
    """The last rank hosts the second trainer's workers; one rank and two split the batch into the
    same micro-batches.
    """
    torch.testing.assert_close(
        run_on_ranks(on_ranks, ranks, shards, replicas)[-1], on_ranks(1, 1), rtol=1e-6, atol=1e-9
    )


def test_a_compiled_model_that_drops_is_refused() -> None:
    with pytest.raises(ValueError, match="a compiled model cannot draw dropout"):
        dropping(compile=True)


@pytest.mark.parametrize("weights", [False, True])
def test_multihead_attention_draws_from_it_too(weights: bool) -> None:
    """Its function has attention and dropout inside, which the context does not see."""
    layer, inputs = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True), torch.randn(2, 5, 8)

    def output(position: int) -> Tensor:
        with own_dropout(0, 0, position, CPU):
            attended: Tensor = layer(inputs, inputs, inputs, need_weights=weights)[0]
        return attended

    assert output(3).equal(output(3))
    assert not output(3).equal(output(4))
    with torch.device("cpu"):  # Another context of this kind.
        assert output(3).equal(output(3))
    layer.dropout = 0.0
    torch.testing.assert_close(output(3), layer(inputs, inputs, inputs)[0])


def test_each_micro_batch_draws_by_its_seed_stream_and_first_sample(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A test step of four groups, and two steps of two micro-batches of two samples."""
    seen: list[tuple[int, ...]] = []

    def record(*key: Any) -> Any:
        seen.append(key[:3])
        return own_dropout(*key)

    monkeypatch.setattr("adloco.algorithms.worker.own_dropout", record)
    dropping(seed=5).round()
    positions = (0, 1, 2, 3, 4, 6, 8, 10)
    assert sorted(seen) == [(5, stream, at) for stream in range(4) for at in positions]


def test_dropout_is_off_in_an_evaluation_and_on_again_after_it() -> None:
    run, modes = dropping(), list[bool]()
    run.round()
    run.evaluate(lambda model, part, parts: [float(modes.append(model.training) or 0), 1.0])
    assert modes == [False] * 4
    run.round()
    assert all(worker.model.training for worker in run.workers.values())
