"""Model FLOPs utilisation (MFU): how much of a GPU's arithmetic the training of a model uses.

What is counted is what the model needs for a token, whatever the program computes: 6 FLOPs for each
weight of a matrix that a token is multiplied by (2 forwards, 4 backwards, or 2 if it is frozen; an
embedding is looked up and counts nothing), and 12 x layers x width of all heads x context for
attention, as if each token saw the whole context (PaLM, arXiv 2204.02311, appendix B). Gradient
checkpointing, evaluation and syncs count nothing. The peak is the device's dense bfloat16 rate
without sparsity, whatever type a run computes in.
"""

import re
from typing import Any

import torch
from torch import nn

PEAK_FLOPS = {
    "B200": 2250e12,
    "GH200": 989.4e12,
    "H200 NVL": 835e12,
    "H200": 989.4e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989.4e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "A10G": 70e12,
    "RTX 4090": 165.2e12,
}
"""Dense bfloat16 FLOPs per second of a device, by words of its name, the first that fits: from the
vendor's data sheets.
"""


def flops_per_token(model: nn.Module, context: int) -> float | None:
    """FLOPs of training on one token; None if the model's configuration does not say, if it has
    more than matrices (convolutions, or experts of which each token takes some), if layers share
    their weights or have heads of different widths, or if a sample is not counted in tokens.

    Args:
        model: With the `config` of a transformers model.
        context: Tokens of a sample.
    """
    config: Any = getattr(model, "config", None)
    # transformers raises an error where such a configuration is asked for a width (Gemma 4's).
    if getattr(config, "is_heterogeneous", False):
        return None
    layers = getattr(config, "num_hidden_layers", None)
    heads = getattr(config, "num_attention_heads", None)
    stacked = any(each.dim() > 2 for each in model.parameters())
    shared = getattr(config, "num_hidden_groups", layers) != layers  # ALBERT's.
    if not layers or not heads or stacked or shared or context == 1:
        return None
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    if getattr(config, "kv_lora_rank", None):  # Latent attention: values have another width.
        width = (config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim) / 2
    multiplying = (each for each in model.modules() if not isinstance(each, nn.Embedding))
    # Parameters, because PEFT's adapters also show the weight of the layer that they hold.
    weights = (module._parameters.get("weight") for module in multiplying)
    matrices = sum(
        (6 if each.requires_grad else 4) * each.numel()
        for each in weights
        if each is not None and each.dim() == 2
    )
    return float(matrices + 12 * layers * heads * width * context)


def peak_flops(device: torch.device) -> float | None:
    """The device's peak, from `PEAK_FLOPS`; None if it is not in the table."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    if re.search(r"\b(MIG|Laptop)\b", name):  # A part of the device, or a slower one.
        return None
    fits = (peak for part, peak in PEAK_FLOPS.items() if re.search(rf"\b{part}\b", name))
    return next(fits, None)


def use_per_token(
    model: nn.Module, context: int, device: torch.device, devices: float
) -> float | None:
    """The share of all devices' peak that a token in each second takes; None if not known.

    Args:
        device: One of the devices, which are alike.
        devices: Their number.
    """
    flops, peak = flops_per_token(model, context), peak_flops(device)
    return None if flops is None or peak is None else flops / (devices * peak)
