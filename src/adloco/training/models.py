"""Building a run's model, from scratch or with trained weights.

From scratch, a model is built without memory and filled part by part, so that a rank that shards it never holds the whole. The draws of a part depend
on the seed and the part's name alone: the same on every placement.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn

from adloco.algorithms.dropout import mixed_seed, recomputed_alike
from adloco.placement.blocks import fill_whole
from adloco.rules.checks import require
from adloco.training.model_sources import Head, LlamaShape, ModelOptions, is_causal


@dataclass(frozen=True, kw_only=True)
class ModelBuilder:
    """Builds a run's model. Calling it gives one without memory (on the meta device), to be filled, or one with its trained weights."""

    config: Any
    head: Head
    options: ModelOptions
    seed: int
    weights: str = ""

    def __call__(self) -> nn.Module:
        import transformers

        auto, dtype = getattr(transformers, self.head), {"fp32": torch.float32, "bf16": torch.bfloat16}[self.options.dtype]
        if self.weights:
            model = self._pretrained(auto, dtype)
        else:
            try:
                with torch.device("meta"):
                    model = auto.from_config(self.config, dtype=dtype, trust_remote_code=False)
            except Exception as error:  # Sizes that do not go together, types without this head: in the library's own words, a paragraph or more.
                reason = " ".join(str(error).split())[:160]
                raise ValueError(f"no {self.head} of a {self.config.model_type} can be built with these sizes ({reason}); see model.name") from error
        if self.options.gradient_checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": False, "context_fn": recomputed_alike})
        built: nn.Module = model
        return built

    def _pretrained(self, auto: Any, dtype: torch.dtype) -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)  # For a new head, drawn alike on all ranks.
            try:
                model, report = auto.from_pretrained(self.weights, config=self.config, dtype=dtype, trust_remote_code=False, output_loading_info=True)
            except Exception as error:
                advice = "give a folder with weights or a hub name that can be reached, leave its sizes as they are, or set model.pretrained false"
                raise ValueError(f"the weights of model.name {self.weights!r} could not be loaded ({type(error).__name__}); {advice}") from error
        # A new head is drawn; a body must be there.
        body = [key for key in report["missing_keys"] if is_causal(self.head) or key.startswith(f"{model.base_model_prefix}.")]
        missing = sorted(key for key in body if "pooler" not in key)
        rest = f"{len(missing)} tensors of the model, {missing[0]} for one" if missing else ""
        require(not missing, f"the weights of model.name {self.weights!r} lack {rest}; leave its sizes as they are, or set model.pretrained false")
        return model

    def fill(self, model: Any, part: nn.Module) -> None:
        """Give memory on the CPU and drawn values to a part of a model, or to what is left of the whole."""
        name = next(name for name, module in model.named_modules() if module is part)
        fresh = {module for module in part.modules() if any(tensor.is_meta for tensor in _own_tensors(module))}
        for module in fresh:
            module.to_empty(device="cpu", recurse=False)
            for tensor in _own_tensors(module):
                tensor.data.fill_(_undrawn(tensor))
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(mixed_seed(self.seed, name))
            _draw(model, part, fresh)
        if not all(_is_drawn(tensor) for module in fresh for tensor in _own_tensors(module)):
            raise ValueError(f"a {self.config.model_type} leaves weights undrawn (in {name or 'its root'}); it can only start from trained weights")
        if part is model:
            model.tie_weights()  # type: ignore[operator]  # Filling gave each user of a tied weight its own.

    def whole(self) -> nn.Module:
        """A model with memory and values, on the CPU."""
        model: nn.Module = self()
        if not self.weights:
            fill_whole(model, self.fill)
        return model

    def num_parameters(self) -> int:
        """Counted without memory."""
        model: nn.Module = replace(self, weights="")()
        return sum(parameter.numel() for parameter in model.parameters())

    def num_bytes(self) -> int:
        """Of all parameters."""
        return self.num_parameters() * {"fp32": 4, "bf16": 2}[self.options.dtype]


def build_llama(shape: LlamaShape, vocab_size: int, seed: int) -> nn.Module:
    """A causal Llama with weights drawn from the seed."""
    return ModelBuilder(config=shape.config(vocab_size), head="AutoModelForCausalLM", options=ModelOptions(), seed=seed).whole()


def _draw(model: Any, module: nn.Module, fresh: Collection[nn.Module]) -> bool:
    """Initialise a module after its children, as transformers does, where anything in it is fresh; returns whether."""
    drawn = [_draw(model, child, fresh) for child in module.children()]
    if module not in fresh and not any(drawn):
        return False
    model._init_weights(module)
    return True


def _undrawn(tensor: torch.Tensor) -> float | int | bool:
    """A value that no initialisation gives (but for flags)."""
    if tensor.is_floating_point():
        return math.nan
    return False if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).min


def _is_drawn(tensor: torch.Tensor) -> bool:
    if tensor.is_floating_point():
        return not tensor.isnan().any()
    return tensor.dtype == torch.bool or not (tensor == _undrawn(tensor)).any()


def _own_tensors(module: nn.Module) -> list[torch.Tensor]:
    return list(chain(module.parameters(recurse=False), module.buffers(recurse=False)))


def save_config(config: Any, folder: Path) -> None:
    """Write config.json, so that the run's model can be built without the hub."""
    config.save_pretrained(folder)


def load_config(folder: Path) -> Any:
    """The configuration in a folder."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(folder, trust_remote_code=False)
