"""A row of the table that leads from the authors' keys to ours, and the values that it computes
with.

docs/from-the-authors-script.md shows the whole table; `setup_keys` and `training_keys` have it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Settings = dict[str, Any]
"""`section.key` of a recipe -> value."""


@dataclass(frozen=True)
class Given:
    """The values of an authors' configuration by key; None where a key is missing."""

    values: Mapping[str, Any]

    def __getitem__(self, key: str) -> Any:
        return self.values[key]

    @property
    def local_sgd(self) -> bool:
        """True if the method is LocalSGD; else it is DiLoCo."""
        return bool(self["distributed_algo"] == "LocalSGD")

    @property
    def tests(self) -> bool:
        """True if a test on gradients decides the batch."""
        return self["sampling_method"] in ("norm_test", "augmented_inner_product_test")

    @property
    def workers(self) -> int:
        """Workers of each trainer at the start."""
        nodes = len(str(self["CUDA_VISIBLE_DEVICES"]).split(",")) * self["nodes_per_gpu"]
        return max(1, int(nodes // self["num_init_trainers"]))


def nothing(given: Given) -> Settings:
    """The settings of a key that has no counterpart."""
    return {}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One or more keys of the authors, what they are here, and what differs."""

    keys: tuple[str, ...]
    """Names in the last commit; those inside `model_config` as model_config.name."""
    older: tuple[str, ...] = ()
    """Names of the (one) key in the configuration that their README shows."""
    only: str = ""
    """The row is about this value of the key. Empty: about every value without a row."""
    ours: str = "none"
    """The settings here, in Markdown."""
    differs: str = ""
    """What differs in meaning, in sentences of Markdown."""
    kind: Any = str
    """Type of the value."""
    default: Any = None
    """What a missing key is taken as; None: the settings keep their defaults here."""
    settings: Callable[[Given], Settings] = nothing
    """The settings here, if the key is given or has a default."""


Table = dict[str, tuple[Row, ...]]
"""Heading -> rows."""
