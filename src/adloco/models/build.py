"""Building a run's model, from scratch or with trained weights.

A model is built without memory (on the meta device) and filled part by part, so a rank with a shard
never has the whole model in memory. From scratch, the values of a part depend only on the seed and
the part's name, so they are the same on every placement. Trained weights are read part by part too,
if `models.weights` finds them.
"""

import copy
import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from adloco.algorithms.dropout import mixed_seed, recomputed_alike
from adloco.distributed.parallel.layers import Fill, fill_whole
from adloco.errors import require
from adloco.hub_access import hub_asked
from adloco.models.source import Head, ModelOptions, is_causal
from adloco.models.transformers_versions import recompute_activations
from adloco.models.weights import StoredWeights, find_weights, frozen_weights

FROZEN = "frozen.safetensors"
"""File of frozen parameters beside a configuration, of a run that began with trained weights."""


@dataclass(frozen=True, kw_only=True)
class ModelBuilder:
    """Builds a run's model of transformers, as `Builder` says."""

    config: Any
    head: Head
    options: ModelOptions
    seed: int
    weights: str = ""

    def __call__(self) -> nn.Module:
        model = self._whole_from_library() if self.stored.only_whole else self._empty()
        if self.options.gradient_checkpointing:
            recompute_activations(model, {"use_reentrant": False, "context_fn": recomputed_alike})
        built: nn.Module = model
        return built

    @property
    def filling(self) -> Fill | None:
        return None if self.stored.only_whole else self.fill

    @cached_property
    def stored(self) -> StoredWeights:
        if self.weights:
            return find_weights(self.weights, self._empty(), self._must_be_there, self._dtype)
        # Where `load_config` has read the configuration; elsewhere there is no such file.
        file = Path(self.config.name_or_path) / FROZEN
        known = self.config.name_or_path and file.is_file()
        return frozen_weights(file, self._empty()) if known else StoredWeights()

    @property
    def _auto(self) -> Any:
        import transformers

        return getattr(transformers, self.head)

    @property
    def _dtype(self) -> torch.dtype:
        return {"fp32": torch.float32, "bf16": torch.bfloat16}[self.options.dtype]

    def _empty(self) -> Any:
        # Older versions of transformers give it to the head alone, the configuration's to the body.
        self.config.dtype = self._dtype
        try:
            with torch.device("meta"):
                # Each model has its own, of which `without_mask` changes an entry.
                return self._auto.from_config(
                    copy.deepcopy(self.config), dtype=self._dtype, trust_remote_code=False
                )
        except Exception as error:
            # Sizes that do not fit together, or a type without this head. The message of
            # transformers can be long.
            reason = " ".join(str(error).split())[:160]
            raise ValueError(
                f"no {self.head} of a {self.config.model_type} can be built with these sizes "
                f"({reason}); see model.name"
            ) from error

    def _must_be_there(self, name: str, base: str) -> bool:
        """True if trained weights without this tensor are refused.

        A classification head and a pooler may be missing, and are drawn; all else must be stored.

        base: Name of the body (the model without its head) in the model.
        """
        return "pooler" not in name and (is_causal(self.head) or name.startswith(f"{base}."))

    def _whole_from_library(self) -> Any:
        auto, dtype = self._auto, self._dtype
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)  # A new head is then the same on all ranks.
            try:
                with hub_asked(self.weights):
                    model, report = auto.from_pretrained(
                        self.weights,
                        config=self.config,
                        dtype=dtype,
                        trust_remote_code=False,
                        output_loading_info=True,
                    )
            except Exception as error:
                # Labels may have other classes than a stored head.
                classes = (
                    f" (a head among them must have {self.config.num_labels} classes, as here)"
                )
                head = "" if is_causal(self.head) else classes
                raise ValueError(
                    f"the weights of model.name {self.weights!r} could not be loaded "
                    f"({type(error).__name__}); give a folder with weights or a hub name that can "
                    f"be reached, leave its sizes as they are{head}, "
                    "or set model.pretrained false"
                ) from error
        base = model.base_model_prefix
        missing = sorted(key for key in report["missing_keys"] if self._must_be_there(key, base))
        rest = f"{len(missing)} tensors of the model, such as {missing[0]}" if missing else ""
        require(
            not missing,
            f"the weights of model.name {self.weights!r} lack {rest}; leave its sizes as they are, "
            "or set model.pretrained false",
        )
        return model

    def fill(self, model: Any, part: nn.Module) -> None:
        """Give memory on the CPU, and stored or drawn values, to a part of a model.

        part: A module of the model, or the model itself for all parts that are not yet filled.

        Raises:
            ValueError: transformers does not initialise a weight that is not stored.
        """
        from transformers import PreTrainedModel
        from transformers.initialization import guard_torch_init_functions

        named = dict(model.named_modules())
        name = next(name for name, module in named.items() if module is part)
        fresh = {
            module
            for module in part.modules()
            if any(tensor.is_meta for tensor in _own_tensors(module))
        }
        for module in fresh:
            module.to_empty(device="cpu", recurse=False)
            for tensor in _own_tensors(module):
                tensor.data.fill_(_undrawn(tensor))
        stored = self.stored.read(model, fresh)
        for tensor in stored:
            # Otherwise the library would draw it.
            tensor._is_hf_initialized = True  # type: ignore[attr-defined]
        to_draw = {module for module in fresh if not stored.issuperset(_own_tensors(module))}
        with torch.random.fork_rng(devices=[]), torch.no_grad(), guard_torch_init_functions():
            # A new head on a trained body is drawn as from_pretrained draws it.
            torch.manual_seed(self.seed if self.weights else mixed_seed(self.seed, name))
            # As in transformers, by the innermost model: some use what only the body has.
            *_, inner = (
                each
                for place, each in named.items()
                if isinstance(each, PreTrainedModel)
                and f"{name}.".startswith(place and f"{place}.")
            )
            _draw(inner, part, to_draw)
        own = (tensor for module in to_draw for tensor in _own_tensors(module))
        if not all(_is_drawn(tensor) for tensor in own if tensor not in stored):
            advice = (
                "and they are missing from its trained weights"
                if self.weights
                else "it can only start from trained weights"
            )
            raise ValueError(
                f"transformers does not initialise all weights of a {self.config.model_type} (in "
                f"{name or 'its root'}); {advice}"
            )
        if part is model:
            # Filling gave tied weights memory of their own.
            model.tie_weights()  # type: ignore[operator]

    def whole(self) -> nn.Module:
        model: nn.Module = self()
        if self.filling:
            fill_whole(model, self.filling)
        return model

    @cached_property
    def parameters(self) -> list[torch.Tensor]:
        return list(self._empty().parameters())

    def save_config(self, folder: Path) -> None:
        """Write config.json, so that the run's model can be built without the hub, and the trained
        values of parameters that transformers freezes, which no checkpoint has.
        """
        self.config.save_pretrained(folder)
        if self.weights and not all(each.requires_grad for each in self.parameters):
            named = self.whole().named_parameters()
            frozen = {name: each.contiguous() for name, each in named if not each.requires_grad}
            save_file(frozen, folder / FROZEN)

    @staticmethod
    def load_config(folder: Path) -> Any:
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(folder, trust_remote_code=False)


def _draw(model: Any, module: nn.Module, fresh: Collection[nn.Module]) -> bool:
    """Initialise a module after its children, as transformers does, if anything in it is fresh: by
    the innermost model that has it. Returns True if it was initialised.
    """
    from transformers import PreTrainedModel

    model = module if isinstance(module, PreTrainedModel) else model
    drawn = [_draw(model, child, fresh) for child in module.children()]
    if module not in fresh and not any(drawn):
        return False
    model._init_weights(module)
    return True


def _undrawn(tensor: torch.Tensor) -> float | int | bool:
    """A value by which a tensor that nobody initialised is recognised; booleans have none."""
    if tensor.is_floating_point():
        return math.nan
    return False if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).min


def _is_drawn(tensor: torch.Tensor) -> bool:
    if tensor.is_floating_point():
        return not tensor.isnan().any()
    return tensor.dtype == torch.bool or not (tensor == _undrawn(tensor)).any()


def _own_tensors(module: nn.Module) -> list[torch.Tensor]:
    return list(chain(module.parameters(recurse=False), module.buffers(recurse=False)))
