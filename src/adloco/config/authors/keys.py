"""Every key of the AdLoCo authors' configuration: its type, its default and the settings it gives.

`keys.md` says what each key is here and what differs in meaning, in the same order.
"""

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from adloco.rules.controller import BatchGuards

Settings = dict[str, Any]
"""`section.key` of a recipe -> value."""
Given = Mapping[str, Any]
"""The values of an authors' configuration by key; None where a key is missing."""
Gives = Mapping[str, Any]
"""Setting -> its value, or a function of the key's value and all values; where that returns None,
the setting is left out.
"""


@dataclass(frozen=True)
class Key:
    """A key of the authors' last commit; one inside `model_config` is model_config.name."""

    kind: Any = str
    """Type of the value."""
    gives: Gives = field(default_factory=dict)
    choices: Mapping[str, Gives] = field(default_factory=dict)
    """Value -> what it gives, instead of `gives`; "" is any other value."""
    default: Any = None
    """Value of a missing key; None: the settings keep their defaults here."""
    older: str = ""
    """Name in the configuration that the authors' README shows."""
    when: tuple[str, Any] | None = None
    """Another key and the value that it must have; else nothing is given."""

    def settings(self, value: Any, given: Given) -> Settings:
        """The settings that a value of this key gives."""
        if value is None or (self.when and given[self.when[0]] != self.when[1]):
            return {}
        gives = self.choices.get(value, self.choices.get("", {})) if self.choices else self.gives
        found = {name: to(value, given) if callable(to) else to for name, to in gives.items()}
        return {name: setting for name, setting in found.items() if setting is not None}


def _same(value: Any, given: Given) -> Any:
    return value


def _workers(value: Any, given: Given) -> int:
    """Workers of each trainer at the start."""
    nodes = len(str(given["CUDA_VISIBLE_DEVICES"]).split(",")) * given["nodes_per_gpu"]
    return max(1, int(nodes // given["num_init_trainers"]))


def _initial(value: int, given: Given) -> int:
    """The first batch of a trainer; a test compares the samples of a worker, so it needs two."""
    tests = given["sampling_method"] in ("norm_test", "augmented_inner_product_test")
    return _workers(value, given) * max(value, 2 if tests else 1)


def _maximum(value: int, given: Given) -> int:
    return max(_initial(value, given), BatchGuards().maximum)


def _if_imdb(value: Any, given: Given) -> Any:
    return value if given["dataset"] == "imdb" else None


def _unless_imdb(value: Any, given: Given) -> Any:
    return None if given["dataset"] == "imdb" else value


def _if_named(value: Any, given: Given) -> Any:
    return value if given["model_config.name"] else None


def _first_rows(value: Any, given: Given) -> int | None:
    """C4's whole split has 364,608 rows, and `evaluation.windows` reads 64 windows."""
    return None if given["val_size"] else 100


C4, DILOCO = ("dataset", "c4"), ("distributed_algo", "DiLoCo")
TEST = {"batch.estimator": "plug-in", "batch.grow_only": True}
KEYS = {
    "CUDA_VISIBLE_DEVICES": Key(str | int, default="0"),
    "devices": Key(object),
    "real_device_ids": Key(object),
    "nodes_per_gpu": Key(PositiveInt, {"method.workers_per_trainer": _workers}, default=1),
    "num_init_trainers": Key(
        PositiveInt, {"method.num_trainers": _same}, default=1, older="number_of_initial_trainers"
    ),
    "training_seed": Key(int, {"run.seed": _same}),
    "single_seed": Key(bool),
    "need_to_reinit_output_layers": Key(bool),
    "dataset": Key(
        choices={
            "c4": {
                "data.dataset": "allenai/c4",
                "data.validation_split": "validation",
                "data.validation_samples": _first_rows,
                "data.context_tokens": 512,
                "task.kind": "language-model",
            },
            "imdb": {
                "data.dataset": "stanfordnlp/imdb",
                "data.validation_split": "test",
                "data.context_tokens": 128,
                "task.kind": "classification",
            },
        }
    ),
    "c4_language": Key(str, {"data.config": _same}, default="en", when=C4),
    "data_sample_size": Key(PositiveInt, {"data.samples": _unless_imdb}),
    "c4_streaming": Key(bool, {"data.streaming": _same}, default=False, when=C4),
    "c4_tokenized_path": Key(str | None),
    "val_size": Key(
        PositiveInt,
        {"task.evaluation_per_class": _if_imdb, "data.validation_samples": _unless_imdb},
    ),
    "samples_per_class": Key(NonNegativeInt),
    "model_type": Key(),
    "model_config.name": Key(
        str, {"model.source": "transformers", "model.name": _same, "data.tokenizer": _same}
    ),
    "model_config.pretrained": Key(bool, {"model.pretrained": _if_named}, default=True),
    "model_config.num_labels": Key(int),
    "project_name": Key(),
    "task_name": Key(str, {"run.name": _same}),
    "log_dir": Key(),
    "log_file": Key(),
    "memory_report_dir": Key(),
    "model_training_report_dir": Key(),
    "model_weights_dir": Key(),
    "num_outer_steps": Key(
        PositiveInt, {"run.rounds": _same, "run.tokens": 0}, older="number_of_training_epochs"
    ),
    "num_inner_steps": Key(
        PositiveInt, {"method.sync_every": _same}, older="number_of_inner_steps_between_outers"
    ),
    "lr_inner": Key(
        PositiveFloat,
        {
            "inner.lr": _same,
            "method.max_grad_norm": 0,
            "learning_rate.shape": "constant",
            "learning_rate.warmup_fraction": 0,
        },
        older="learning_rate_for_inner_opt",
    ),
    "lr_outer": Key(
        PositiveFloat, {"outer.lr": _same}, older="learning_rate_for_outer_opt", when=DILOCO
    ),
    "lr_sgd": Key(object),
    "initial_batch_size": Key(
        PositiveInt,
        {"batch.initial": _initial, "batch.minimum": _initial, "batch.maximum": _maximum},
        older="INITIAL_BATCH_SIZE",
    ),
    "distributed_algo": Key(
        choices={
            "DiLoCo": {
                "inner.optimizer": "adamw",
                "inner.betas": [0.9, 0.999],
                "inner.weight_decay": 0.01,
                "outer.update": "optimizer",
                "outer.optimizer": "SGD",
                "outer.options": {},
            },
            "LocalSGD": {
                "inner.optimizer": "sgd",
                "inner.momentum": 0,
                "inner.weight_decay": 0,
                "outer.update": "mean",
                "merge.policy": "none",
            },
        },
        default="DiLoCo",
    ),
    "padding_percentage": Key(
        PositiveFloat, {"memory.fraction": _same, "switch.max_micro_batch": "auto"}
    ),
    "save_weights_every": Key(PositiveInt, {"run.checkpoint_every": _same}),
    "merging_policy": Key(
        choices={
            "worst_with_worst": {"merge.policy": "smallest", "merge.count": 2},
            "best_with_worst": {"merge.policy": "largest-with-smallest", "merge.count": 2},
        },
        default="worst_with_worst",
        when=DILOCO,
    ),
    "merge_frequency": Key(
        PositiveInt, {"merge.every": _same, "merge.first_round": _same}, default=2, when=DILOCO
    ),
    "sampling_method": Key(
        choices={
            "norm_test": {"batch.rule": "norm-test"} | TEST,
            "augmented_inner_product_test": {"batch.rule": "augmented"} | TEST,
            "": {"batch.rule": "constant"},
        },
        default="norm_test",
    ),
    "ETA": Key(PositiveFloat, {"batch.eta": _same}, when=("sampling_method", "norm_test")),
    "vartheta": Key(PositiveFloat),
    "nu": Key(PositiveFloat),
    "switch_mode": Key(
        choices={
            "threshold_switch_mode": {"switch.mode": "switch", "switch.multiplier": 2},
            "only_gradient_accumulation": {"switch.mode": "always"},
            "only_data_loader": {"switch.mode": "never"},
        },
        default="threshold_switch_mode",
    ),
}
"""The keys, in the order of `keys.md`."""


@dataclass(frozen=True)
class Words:
    """A row of `keys.md`."""

    keys: tuple[str, ...]
    ours: str
    """The settings here, in Markdown."""
    differs: str
    """What differs in meaning, in sentences of Markdown."""


@functools.cache
def read_words() -> Mapping[str, Words]:
    """The rows of `keys.md` by key, or by `key: value` where a row is about one value."""
    found: dict[str, Words] = {}
    text = resources.files("adloco.config.authors").joinpath("keys.md").read_text(encoding="utf-8")
    for line in text.splitlines():
        theirs, ours, differs = (cell.strip() for cell in line[1:-1].split("|"))
        keys = tuple(re.findall("`(.+?)`", theirs))
        found |= dict.fromkeys(keys, Words(keys, ours, differs))
    return found
