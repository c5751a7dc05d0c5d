"""A plain `nn.Module` of the user's own, from a function that is named by a dotted path."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from adloco.dotted_path import load_object
from adloco.errors import require
from adloco.models.source import Builder
from adloco.setting import setting


@dataclass(frozen=True, kw_only=True)
class ModuleConfig:
    """The dotted path of the user's function, and what it is called with."""

    factory: str
    arguments: Mapping[str, Any]
    vocab_size: int


@dataclass(frozen=True, kw_only=True)
class PlainModule:
    """A plain torch.nn.Module of your own, for language modelling; see docs/python.md."""

    key: ClassVar[str] = "module"
    for_transformers: ClassVar[bool] = False
    weights: ClassVar[str] = ""

    factory: str = setting(code=True)
    """Dotted path of a function that returns the module, for instance mypackage.models:build. The
    function is called with vocab_size, the tokenizer's number of ids. The module takes input_ids of
    shape [samples, tokens] and returns logits of shape [samples, tokens, vocab_size], or an object
    with these as .logits.
    """
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Further keyword arguments of the function, for instance { width = 64 }."""

    @property
    def builder(self) -> type[Builder]:
        from adloco.models.module import ModuleBuilder

        return ModuleBuilder

    def config(self, vocab_size: int) -> ModuleConfig:
        found = load_object(self.factory)
        require(callable(found), f"model.factory {self.factory!r} must be callable, got {found!r}")
        return ModuleConfig(factory=self.factory, arguments=self.arguments, vocab_size=vocab_size)
