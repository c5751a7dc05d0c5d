"""Building a plain `nn.Module` of the user's own, so that it can be called as others are."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from adloco.dotted_path import load_object
from adloco.errors import require
from adloco.models.fixed_values import Values, fixed_values, save_fixed
from adloco.models.source import Head, ModelOptions, is_causal
from adloco.models.sources.plain_module import ModuleConfig
from adloco.models.weights import StoredWeights

CONFIG = "module.json"


class Logits(NamedTuple):
    """Output of a language model."""

    logits: Tensor
    """Floats [samples, tokens, vocab_size or more]."""


class ModuleWithLogits(nn.Module):
    """Makes the user's module callable like a model of transformers."""

    def __init__(self, module: nn.Module, config: ModuleConfig) -> None:
        super().__init__()
        self.module = module
        self._config = config

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> Logits:
        """Run the module.

        Args:
            input_ids: Token ids, int64 [samples, tokens].
            use_cache: Must be False; models of transformers have this argument.

        Raises:
            ValueError: The module does not return logits of the right shape.
        """
        assert not use_cache, "a plain module has no key-value cache"
        output = self.module(input_ids)
        logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
        least = (*input_ids.shape, self._config.vocab_size)
        expected = (
            f"the module of {self._config.factory!r} must return logits or an object with .logits"
        )
        if not isinstance(logits, Tensor):
            raise ValueError(f"{expected}, got {type(output).__name__}")
        found = tuple(logits.shape)
        require(
            found[:-1] == least[:-1] and found[-1] >= least[-1],
            f"{expected} of shape {least} (samples, tokens, vocab_size), got {found}",
        )
        return Logits(logits)


@dataclass(frozen=True, kw_only=True)
class ModuleBuilder:
    """Builds the user's module; a call returns it with memory and values, on the CPU.

    Nobody knows how it draws its weights, so each rank builds the whole module and then shards it.
    """

    config: ModuleConfig
    head: Head
    options: ModelOptions
    seed: int
    weights: str = ""
    filling: ClassVar[None] = None
    stored: ClassVar[StoredWeights] = StoredWeights()

    def __post_init__(self) -> None:
        require(
            is_causal(self.head),
            "model.source module is for language models; use task.kind language-model, or another "
            "source",
        )
        require(
            not self.options.gradient_checkpointing,
            "model.gradient_checkpointing is for models of transformers; use "
            "torch.utils.checkpoint inside the module",
        )

    def whole(self) -> nn.Module:
        return self()

    def __call__(self) -> nn.Module:
        config = self.config
        factory: Callable[..., Any] = load_object(config.factory)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            try:
                module = factory(vocab_size=config.vocab_size, **config.arguments)
            except Exception as error:  # The user's own code, which may raise anything.
                reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
                called = f"vocab_size = {config.vocab_size} and {dict(config.arguments)}"
                raise ValueError(
                    f"model.factory {config.factory!r} failed when it was called with {called} "
                    f"({reason})"
                ) from error
        require(
            isinstance(module, nn.Module),
            f"model.factory {config.factory!r} must return a torch.nn.Module, got "
            f"{type(module).__name__}",
        )
        # Not `to`, which leaves only the real part of complex numbers, such as rotary positions.
        module = {"fp32": module.float, "bf16": module.bfloat16}[self.options.dtype]()
        return ModuleWithLogits(module, config)

    @cached_property
    def _shown(self) -> tuple[list[Tensor], Values]:
        """The parameters, without memory, and what is not saved, of a module."""
        module = self()
        return [parameter.to("meta") for parameter in module.parameters()], fixed_values(module)

    @property
    def parameters(self) -> list[Tensor]:
        return self._shown[0]

    def save_config(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CONFIG).write_text(json.dumps(asdict(self.config), indent=2) + "\n")
        save_fixed(self._shown[1], folder)

    @staticmethod
    def load_config(folder: Path) -> ModuleConfig:
        return ModuleConfig(**json.loads((folder / CONFIG).read_text()))
