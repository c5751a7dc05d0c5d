"""FLOPs of a token by hand arithmetic, and the peaks of devices."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AlbertConfig,
    AlbertForSequenceClassification,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from adloco.run.model_flops import flops_per_token, peak_flops, use_per_token


@pytest.mark.parametrize("tied", [False, True])
def test_a_llama_by_hand(tied: bool) -> None:
    config = LlamaConfig(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    layer = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 80
    expected = 6 * (3 * layer + 32 * 100) + 12 * 3 * 32 * 64
    assert flops_per_token(LlamaForCausalLM(config), 64) == expected


def test_a_gpt2_whose_layers_are_no_linear_modules() -> None:
    config = GPT2Config(vocab_size=100, n_positions=64, n_embd=32, n_layer=2, n_head=4)
    expected = 6 * (2 * 12 * 32 * 32 + 32 * 100) + 12 * 2 * 32 * 64
    assert flops_per_token(GPT2LMHeadModel(config), 64) == expected


def test_latent_attention_whose_values_have_another_width_than_keys() -> None:
    config = DeepseekV3Config(
        vocab_size=100,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=3,
        first_k_dense_replace=3,
        num_attention_heads=4,
        q_lora_rank=32,
        kv_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=12,
    )
    queries, keys_and_values = 64 * 32 + 32 * 4 * 24, 64 * (16 + 8) + 16 * 4 * (16 + 12)
    layer = queries + keys_and_values + 4 * 12 * 64 + 3 * 64 * 160
    attention = 3 * 4 * 64 * (24 + 12)  # Layers, heads, context.
    model = DeepseekV3ForCausalLM(config)
    assert flops_per_token(model, 64) == 6 * (3 * layer + 64 * 100) + 6 * attention


def test_a_frozen_matrix_that_an_adapter_also_shows() -> None:
    """It counts once, and no gradient of it is computed: 4 in place of 6."""

    class Adapter(nn.Module):
        """Shows the weight of the layer that it holds, as PEFT's do."""

        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base, self.down = base.requires_grad_(False), nn.Linear(8, 2)

        @property
        def weight(self) -> Tensor:
            return self.base.weight

    config = LlamaConfig(vocab_size=10, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)
    model = LlamaForCausalLM(config)
    before = flops_per_token(model, 16)
    model.lm_head = Adapter(model.lm_head)
    after = flops_per_token(model, 16)
    assert before is not None
    assert after == before - 2 * 8 * 10 + 6 * 8 * 2


def test_samples_that_are_not_counted_in_tokens_are_unknown() -> None:
    """A problem of one's own that does not say how many tokens a sample has."""
    config = LlamaConfig(vocab_size=10, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)
    assert flops_per_token(LlamaForCausalLM(config), 1) is None


@pytest.mark.parametrize(
    ("config", "model", "sizes"),
    [
        (MixtralConfig, MixtralForCausalLM, {"num_key_value_heads": 2}),
        (AlbertConfig, AlbertForSequenceClassification, {"embedding_size": 16}),
    ],
    ids=["two of eight experts for a token", "one layer twice"],
)
def test_a_model_whose_weights_are_not_used_once_is_unknown(
    config: Any, model: Any, sizes: dict[str, int]
) -> None:
    built = config(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        **sizes,
    )
    assert flops_per_token(model(built), 64) is None


def test_a_model_without_a_configuration_is_unknown() -> None:
    assert flops_per_token(nn.Linear(3, 4), 64) is None


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989.4e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA H100 80GB HBM3", 989.4e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA GH200 480GB", 989.4e12),
        ("NVIDIA GB200", None),
        ("NVIDIA RTX A1000", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("Some other", None),
    ],
)
def test_peaks_by_name(name: str, peak: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    device = SimpleNamespace(type="cuda")
    assert peak_flops(device) == peak  # type: ignore[arg-type]
    assert peak_flops(torch.device("cpu")) is None


def test_the_share_of_all_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    config = LlamaConfig(vocab_size=10, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)
    model, gpu = LlamaForCausalLM(config), torch.device("cuda")
    flops = flops_per_token(model, 16)
    assert flops is not None
    assert use_per_token(model, 16, gpu, 4) == pytest.approx(flops / 4 / 312e12)
    assert use_per_token(model, 16, torch.device("cpu"), 4) is None
    assert use_per_token(nn.Linear(3, 4), 16, gpu, 4) is None
