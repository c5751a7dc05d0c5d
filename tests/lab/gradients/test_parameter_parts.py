"""Layers and kinds of parameters, from the names and classes of modules."""

from collections import defaultdict

import pytest
import torch
from torch import nn

from adloco.distributed.parallel.gradient_norms import trainable
from adloco.lab.gradients.parameter_parts import parameter_parts
from tests.problems import BlockLM

SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "intermediate_size": 12,
    "vocab_size": 11,
}


def kinds(model: nn.Module) -> dict[str, set[str]]:
    """The kinds in each layer."""
    parts = parameter_parts(model)
    assert [part.elements for part in parts] == [each.numel() for each in trainable(model)]
    found: dict[str, set[str]] = defaultdict(set)
    for part in parts:
        found[part.layer].add(part.kind)
    return dict(found)


@pytest.mark.parametrize(
    ("name", "layer", "rest"),
    [
        (
            "Llama",
            "model.layers",
            {"model.embed_tokens": "embedding", "model.norm": "norm", "lm_head": "head"},
        ),
        (
            "GPTNeoX",
            "gpt_neox.layers",
            {
                "gpt_neox.embed_in": "embedding",
                "gpt_neox.final_layer_norm": "norm",
                "HEAD": "head",  # Older versions have another name for it.
            },
        ),
        # Its head is tied to the embedding, and its mlp has no name of its own.
        (
            "OPT",
            "layers",
            {
                "embed_tokens": "embedding",
                "embed_positions": "embedding",
                "final_layer_norm": "norm",
            },
        ),
    ],
)
def test_models_of_transformers(name: str, layer: str, rest: dict[str, str]) -> None:
    import transformers

    sizes = SIZES | ({"ffn_dim": 12, "word_embed_proj_dim": 8} if name == "OPT" else {})
    config = getattr(transformers, f"{name}Config")(**sizes)
    with torch.device("meta"):
        model = getattr(transformers, f"{name}ForCausalLM")(config)
    (head,) = (key for key, part in model.named_modules() if part is model.get_output_embeddings())
    expected = {f"{layer}.{number}": {"attention", "mlp", "norm"} for number in range(2)}
    assert kinds(model) == expected | {
        part.replace("HEAD", head): {kind} for part, kind in rest.items()
    }


def test_plain_modules() -> None:
    tied = {"embedding": {"embedding"}, "blocks.0": {"linear"}, "blocks.1": {"linear"}}
    assert kinds(BlockLM()) == tied
    assert kinds(nn.Sequential(nn.Conv1d(1, 2, 3), nn.GroupNorm(1, 2))) == {
        "0": {"convolution"},
        "1": {"norm"},
    }
    assert kinds(nn.Linear(2, 1)) == {"weight": {"linear"}, "bias": {"linear"}}
    frozen = nn.Sequential(nn.Linear(2, 1), nn.PReLU()).requires_grad_(False)
    frozen[1].requires_grad_(True)
    assert kinds(frozen) == {"1": {"other"}}
