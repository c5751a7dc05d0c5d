"""Trained weights on disk, read part by part: for each tensor of a model, the safetensors file and
the key where it is stored.

The rules of transformers itself say where a model's files are, which names their keys have in the
model, and which weights are tied. If the files do not have each tensor of the model as one tensor
of the same size (another format, keys that are split or merged, another size), `StoredWeights` says
so, and transformers reads the whole model.
"""

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from adloco.distributed.messages import as_bytes
from adloco.distributed.parallel.layers import blocks
from adloco.errors import require
from adloco.hub_access import hub_asked
from adloco.models.transformers_versions import has_extra_files, known_changes

ADAPTER = "adapter_config.json"
"""File beside an adapter of PEFT."""
DIGEST_ELEMENTS = 256
"""Number of first elements of each tensor that enter the digest of weights."""


@dataclass(frozen=True, kw_only=True)
class StoredWeights:
    """Places of a model's weights on disk; without `places` and `only_whole`, all are drawn."""

    places: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Name in the model -> (file, key in the file)."""
    tied: frozenset[str] = frozenset()
    """Names in the model of weights that are tied to a weight of another name."""
    new: frozenset[str] = frozenset()
    """Names in the model of weights that are not stored and may be drawn, such as a new head's."""
    only_whole: str = ""
    """Why the weights cannot be read part by part; empty if they can."""

    def read(self, model: nn.Module, modules: Collection[nn.Module]) -> set[torch.Tensor]:
        """Copy stored weights into the tensors that these modules own directly.

        Args:
            model: The model, from which tensors have their names.
            modules: Modules of the model that have memory.

        Returns:
            The tensors that were copied or are tied, and so must not be drawn.
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
        """SHA-256 in hex of the tensors' names, types, sizes and first elements, to tell others."""
        about = hashlib.sha256(self.only_whole.encode())
        for name, (file, key) in sorted(self.places.items()):
            with safe_open(file, framework="pt") as stored:
                tensor = stored.get_slice(key)
                about.update(f"{name} {tensor.get_dtype()} {tensor.get_shape()} ".encode())
                first = tensor[:1] if tensor.get_shape() else stored.get_tensor(key)
                about.update(as_bytes(first.flatten()[:DIGEST_ELEMENTS]).numpy().tobytes())
        return about.hexdigest()


def find_weights(
    name: str, model: Any, must_be_there: Callable[[str, str], bool], dtype: torch.dtype
) -> StoredWeights:
    """Find trained weights of transformers on disk, by hub name or folder; download them if needed.

    Args:
        model: The model, without memory.
        must_be_there: (name of a tensor, name of the model's body) -> True if it must be stored.

    Raises:
        ValueError: They have an adapter.
    """
    try:
        with hub_asked(name):
            adapted, files = _find(name, ADAPTER), _files(name, model.config)
    except Exception as error:
        # Hub clients raise many errors; from_pretrained fails in the same way, which is reported.
        return StoredWeights(only_whole=type(error).__name__)
    # Without PEFT, transformers would load the model that is under it; with PEFT, freeze all.
    require(
        not adapted,
        f"model.name {name!r} has an adapter ({ADAPTER}), which cannot be trained here; merge it "
        "into its model (PEFT's merge_and_unload, then save_pretrained) and give that folder",
    )
    if model._get_dtype_plan(dtype):
        return StoredWeights(only_whole="some stay in float32")
    try:
        places, reason = _places(model, files)
    except (OSError, SafetensorError, ImportError) as error:
        # Damaged files, or a version of transformers with its rules in other modules.
        return StoredWeights(only_whole=type(error).__name__)
    tied: Mapping[str, str] = model.all_tied_weights_keys
    absent = model.state_dict().keys() - places.keys() - tied.keys()
    inside = {module for block in blocks(model) for module in block.modules()}
    in_blocks = {key for key, _ in _named_tensors(model, inside)}
    if not reason and (tied.keys() & places.keys() or absent & set(tied.values())):
        reason = "tied weights are stored under other names"
    if not reason and any(
        name in in_blocks or must_be_there(name, model.base_model_prefix) for name in absent
    ):
        reason = "some are missing"
    if reason:
        return StoredWeights(only_whole=reason)
    return StoredWeights(places=places, tied=frozenset(tied), new=frozenset(absent))


def frozen_weights(file: Path, model: nn.Module) -> StoredWeights:
    """Places of a model's frozen parameters in a file that has them by name; the rest is drawn."""
    places = {name: (str(file), name) for name, _ in _sizes(str(file))}
    return StoredWeights(places=places, new=frozenset(model.state_dict().keys() - places.keys()))


def _files(name: str, config: Any) -> list[str]:
    """Paths of a model's safetensors files, downloaded if needed; empty if others are read, too."""
    from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
    from transformers.utils.hub import get_checkpoint_shard_files

    special = (
        getattr(config, "quantization_config", None)
        or getattr(config, "transformers_weights", None)
        or has_extra_files(config)
    )
    if special:
        return []
    if single := _find(name, SAFE_WEIGHTS_NAME):
        return [single]
    index = _find(name, SAFE_WEIGHTS_INDEX_NAME)
    return list(get_checkpoint_shard_files(name, index)[0]) if index else []


def _find(name: str, file: str) -> str | None:
    """Path of a file of a model, downloaded if necessary; None if the model has none."""
    from transformers.utils import cached_file

    found: str | None = cached_file(name, file, _raise_exceptions_for_missing_entries=False)
    return found


def _places(model: Any, files: list[str]) -> tuple[dict[str, tuple[str, str]], str]:
    """`StoredWeights.places` of a model's files, and `only_whole`."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, rename_source_key

    if not files:
        return {}, "they are not safetensors alone"
    tensors, prefix = model.state_dict(), model.base_model_prefix
    changes = get_model_conversion_mapping(model)
    if not {type(change) for change in changes} <= {*known_changes()}:
        return {}, "their keys follow rules of their own"
    renamings = [change for change in changes if not isinstance(change, WeightConverter)]
    converters = [change for change in changes if isinstance(change, WeightConverter)]
    stored = {key: (file, size) for file in files for key, size in _sizes(file)}
    places: dict[str, tuple[str, str]] = {}
    twice = False
    for key, (file, size) in stored.items():
        known, converter = rename_source_key(key, renamings, converters, prefix, tensors)
        if known not in tensors and key in tensors:  # A rule renamed a key that was right already.
            known, converter = rename_source_key(key, [], [], prefix, tensors)
        if converter is not None:
            return {}, "they are split or merged"
        if known not in tensors:
            continue  # The model does not have this tensor.
        if size != list(tensors[known].shape):
            return {}, "their sizes differ"
        twice = twice or known in places
        places[known] = (file, key)
    return places, "two of them have one name" if twice else ""


def _sizes(file: str) -> Iterator[tuple[str, list[int]]]:
    with safe_open(file, framework="pt") as stored:
        for key in stored.keys():  # noqa: SIM118  # Not a mapping.
            yield key, list(stored.get_slice(key).get_shape())


def _named_tensors(
    model: nn.Module, modules: Collection[nn.Module]
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name in the model, tensor) of the parameters and buffers that these modules own directly."""
    for place, module in model.named_modules():
        if module in modules:
            for name, tensor in chain(
                module.named_parameters(recurse=False), module.named_buffers(recurse=False)
            ):
                yield f"{place}.{name}" if place else name, tensor
