"""Trained weights as they lie on disk, read part by part: which tensor of which safetensors file is
which of the model.

transformers' own rules say where a model's files are, what their keys are called in the model and
what is tied. Where a tensor of the model is not one of a file as it stands there (other formats,
keys that are split or merged, other sizes), transformers reads all of them and puts them together.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from adloco.distributed.parallel.layers import blocks

DIGEST_ELEMENTS = 256
"""Elements of each tensor that are compared, to tell one set of weights from another."""


@dataclass(frozen=True, kw_only=True)
class StoredWeights:
    """Where the weights of a model are; nowhere, if they are all drawn."""

    places: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """(file, key in the file) by name in the model."""
    tied: frozenset[str] = frozenset()
    """Names in the model that stand for a weight of another name."""
    new: frozenset[str] = frozenset()
    """Names in the model of weights that are not stored and may be drawn: a new head's."""
    only_whole: str = ""
    """Why they cannot be read part by part; empty if they can."""

    def read(self, model: nn.Module, modules: Collection[nn.Module]) -> set[torch.Tensor]:
        """Copy into these modules' own tensors what is stored of them; returns those that have
        their values, or get them by being tied.
        """
        wanted = dict(_named_tensors(model, modules))
        known = self.places.keys() | self.tied
        unknown = [
            name
            for name, tensor in wanted.items()
            if isinstance(tensor, nn.Parameter) and name not in known | self.new
        ]
        assert not (self.places and unknown), f"{unknown} would be drawn although they are stored"
        by_file: dict[str, list[tuple[str, torch.Tensor]]] = {}
        for name in sorted(wanted.keys() & self.places.keys()):
            file, key = self.places[name]
            by_file.setdefault(file, []).append((key, wanted[name]))
        for file, tensors in by_file.items():
            with safe_open(file, framework="pt") as stored:
                for key, tensor in tensors:
                    tensor.data.copy_(stored.get_tensor(key))
        return {wanted[name] for name in wanted.keys() & known}

    def digest(self) -> str:
        """A digest of each tensor's name, type, size and first elements: other weights differ."""
        about = hashlib.sha256(self.only_whole.encode())
        for name, (file, key) in sorted(self.places.items()):
            with safe_open(file, framework="pt") as stored:
                tensor = stored.get_slice(key)
                about.update(f"{name} {tensor.get_dtype()} {tensor.get_shape()} ".encode())
                first = tensor[:1] if tensor.get_shape() else stored.get_tensor(key)
                about.update(
                    first.flatten()[:DIGEST_ELEMENTS]
                    .contiguous()
                    .view(torch.uint8)
                    .numpy()
                    .tobytes()
                )
        return about.hexdigest()


def find_weights(
    name: str, model: Any, must_be_there: Callable[[str, str], bool], dtype: torch.dtype
) -> StoredWeights:
    """Where the trained weights of that hub name or folder are for a model without memory.

    must_be_there: (name of a tensor, name of the model's body) -> whether weights that lack it are
    refused.
    """
    if model._get_dtype_plan(dtype):
        return StoredWeights(only_whole="some stay in float32")
    try:
        files = _files(name, model.config)
    except Exception as error:
        # Hub clients raise all kinds. from_pretrained meets it too; its caller says so.
        return StoredWeights(only_whole=type(error).__name__)
    try:
        places, reason = _places(model, files)
    except (
        OSError,
        SafetensorError,
        ImportError,
    ) as error:  # Damaged files; a transformers that keeps its rules elsewhere.
        return StoredWeights(only_whole=type(error).__name__)
    tied: Mapping[str, str] = model.all_tied_weights_keys
    absent = model.state_dict().keys() - places.keys() - tied.keys()
    in_blocks = {
        key
        for key, _ in _named_tensors(
            model, {module for block in blocks(model) for module in block.modules()}
        )
    }
    if not reason and (tied.keys() & places.keys() or absent & set(tied.values())):
        reason = "tied weights are stored under other names"
    if not reason and any(
        name in in_blocks or must_be_there(name, model.base_model_prefix) for name in absent
    ):
        reason = "some are missing"
    return (
        StoredWeights(only_whole=reason)
        if reason
        else StoredWeights(places=places, tied=frozenset(tied), new=frozenset(absent))
    )


def _files(name: str, config: Any) -> list[str]:
    """The safetensors files of a model, downloaded if need be; none where transformers would read
    others, or more.
    """
    from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file
    from transformers.utils.hub import get_checkpoint_shard_files

    def find(file: str) -> str | None:
        found: str | None = cached_file(name, file, _raise_exceptions_for_missing_entries=False)
        return found

    special = (
        getattr(config, "quantization_config", None)
        or getattr(config, "transformers_weights", None)
        or type(config).extra_files
    )
    if special or find("adapter_config.json"):
        return []
    if single := find(SAFE_WEIGHTS_NAME):
        return [single]
    index = find(SAFE_WEIGHTS_INDEX_NAME)
    return list(get_checkpoint_shard_files(name, index)[0]) if index else []


def _places(model: Any, files: list[str]) -> tuple[dict[str, tuple[str, str]], str]:
    """(file, key) by name in the model, and why that is not all there is to it; empty if it is."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        PrefixChange,
        WeightConverter,
        WeightRenaming,
        rename_source_key,
    )

    if not files:
        return {}, "they are not safetensors alone"
    tensors, prefix = model.state_dict(), model.base_model_prefix
    changes = get_model_conversion_mapping(model)
    if any(
        type(change) not in (WeightRenaming, PrefixChange, WeightConverter) for change in changes
    ):
        return {}, "their keys follow rules of their own"
    renamings = [change for change in changes if not isinstance(change, WeightConverter)]
    converters = [change for change in changes if isinstance(change, WeightConverter)]
    stored = {key: (file, size) for file in files for key, size in _sizes(file)}
    places, uses = {}, Counter[str]()
    for key, (file, size) in stored.items():
        known, converter = rename_source_key(key, renamings, converters, prefix, tensors)
        if known not in tensors and key in tensors:  # Renamed by mistake.
            known, converter = rename_source_key(key, [], [], prefix, tensors)
        if converter is not None:
            return {}, "they are split or merged"
        if known not in tensors:
            continue  # More is stored than this model has.
        if size != list(tensors[known].shape):
            return {}, "their sizes differ"
        places[known] = (file, key)
        uses[known] += 1
    return places, "two of them have one name" if any(count > 1 for count in uses.values()) else ""


def _sizes(file: str) -> Iterator[tuple[str, list[int]]]:
    with safe_open(file, framework="pt") as stored:
        for key in stored.keys():  # noqa: SIM118  # Not a mapping.
            yield key, list(stored.get_slice(key).get_shape())


def _named_tensors(
    model: nn.Module, modules: Collection[nn.Module]
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name in the model, tensor) of these modules' own parameters and buffers."""
    for place, module in model.named_modules():
        if module in modules:
            for name, tensor in chain(
                module.named_parameters(recurse=False), module.named_buffers(recurse=False)
            ):
                yield f"{place}.{name}" if place else name, tensor
