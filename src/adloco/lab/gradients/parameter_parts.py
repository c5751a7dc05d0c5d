"""The layer that a parameter belongs to, and its kind: embedding, attention, mlp, norm and so on.

Both follow from the names and classes of the modules around it, for models of transformers and for
plain modules alike.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from torch import nn

NAMED_KINDS = {
    "attention": ("attn", "attention"),
    "mlp": ("mlp", "ffn", "feed_forward", "feedforward", "expert"),
    "head": ("head", "classifier", "pooler", "score", "embed_out", "qa_outputs"),
    "embedding": ("embed", "wte", "wpe"),
}
"""Kinds by what the name of a parameter contains, tried in this order."""
CLASS_KINDS = {"linear": "linear", "conv": "convolution"}
"""Kinds of other parameters by what the name of their module's class contains."""


@dataclass(frozen=True, kw_only=True)
class ParameterPart:
    """The layer and kind of a parameter."""

    layer: str
    """The repeated block that it is in, such as layers.0, or else its module."""
    kind: str
    elements: int
    """Number of its values."""


def parameter_parts(model: nn.Module) -> list[ParameterPart]:
    """The part of each trainable parameter, in the order of `trainable(model)`.

    A tied parameter belongs to the first module that uses it.
    """
    named = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
    layers = _without_common_start([_layer(name) for name, _ in named])
    with_attention = {
        layer
        for layer, (name, _) in zip(layers, named, strict=True)
        if _kind_by_name(name) == "attention"
    }
    return [
        ParameterPart(
            layer=layer,
            kind=_kind(name, model, inside_transformer=layer in with_attention),
            elements=parameter.numel(),
        )
        for layer, (name, parameter) in zip(layers, named, strict=True)
    ]


def _layer(name: str) -> list[str]:
    """The path of a parameter's layer: up to the first number, or else that of its module."""
    words = name.split(".")
    before = list(takewhile(lambda word: not word.isdecimal(), words))
    if len(before) < len(words):
        return words[: len(before) + 1]
    return words[:-1] or words


def _without_common_start(paths: Sequence[Sequence[str]]) -> list[str]:
    """The paths as dotted names, without the words that all but the last of each begin with."""
    most = min((len(path) - 1 for path in paths), default=0)
    shared = 0
    while shared < most and len({path[shared] for path in paths}) == 1:
        shared += 1
    return [".".join(path[shared:]) for path in paths]


def _kind(name: str, model: nn.Module, *, inside_transformer: bool) -> str:
    owner = type(model.get_submodule(name.rpartition(".")[0])).__name__.lower()
    if "norm" in owner:
        return "norm"
    if owner.startswith("embedding"):
        return "embedding"
    by_class = next((kind for part, kind in CLASS_KINDS.items() if part in owner), "other")
    # Some models do not name their mlp: its matrices are those of the layer beside attention.
    rest = "mlp" if inside_transformer and by_class == "linear" else by_class
    return _kind_by_name(name) or rest


def _kind_by_name(name: str) -> str:
    lower = name.lower()
    return next(
        (kind for kind, parts in NAMED_KINDS.items() if any(part in lower for part in parts)), ""
    )
