"""The model of a problem from Python, which only the script of `adloco.train` can build."""

import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakSet

import torch
from torch import nn

from adloco.algorithms.method import Problem
from adloco.distributed.parallel.layers import Fill, fill_whole
from adloco.errors import require
from adloco.models.fixed_values import Values, fixed_values, save_fixed
from adloco.models.source import Builder, ModelOptions
from adloco.models.weights import StoredWeights

CONFIG = "problem.json"


@dataclass(frozen=True, kw_only=True)
class ProblemModel:
    """The model of a problem from Python."""

    for_transformers: ClassVar[bool] = False
    weights: ClassVar[str] = ""

    @property
    def builder(self) -> type[Builder]:
        raise ValueError(
            "the model of this run is in the Python script that began it; use "
            "adloco.train(resume=RUN, problem=...) or adloco.load(RUN, problem=...) there"
        )

    def config(self, vocab_size: int) -> Any:
        return self.builder


@dataclass(frozen=True, kw_only=True)
class ProblemBuilder:
    """Builds the model of a problem, with the seed of the run."""

    problem: Problem
    options: ModelOptions
    seed: int
    weights: str = ""
    stored: ClassVar[StoredWeights] = StoredWeights()
    _built: WeakSet[nn.Module] = field(default_factory=WeakSet, init=False, repr=False)

    def __post_init__(self) -> None:
        untouched = self.options.dtype == "fp32" and not self.options.gradient_checkpointing
        require(
            untouched,
            "model.dtype and model.gradient_checkpointing do not act on the model of a problem; "
            "leave them out, and build the model as it should be in problem.build_model",
        )

    @cached_property
    def _shown(self) -> tuple[dict[str, torch.Tensor], Values]:
        """The parameters by name, without memory, and what is not saved, of a model."""
        model = self._build()
        self._built.add(model)
        named = {name: tensor.to("meta") for name, tensor in model.named_parameters()}
        return named, {} if self.filling else fixed_values(model)

    @property
    def parameters(self) -> list[torch.Tensor]:
        return list(self._shown[0].values())

    @property
    def config(self) -> dict[str, list[int]]:
        """The shape of each parameter, by name."""
        return {name: list(tensor.shape) for name, tensor in self._shown[0].items()}

    @property
    def filling(self) -> Fill | None:
        return self.problem.fill

    def _build(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            model = self.problem.build_model()
        require(isinstance(model, nn.Module), f"build_model must return a model, got {type(model)}")
        return model

    def __call__(self) -> nn.Module:
        """A model to train, which no call gave before."""
        model = self._build()
        require(model not in self._built, "build_model must give a new model at each call")
        self._built.add(model)
        return model

    def whole(self) -> nn.Module:
        model = self._build()
        if self.filling:
            fill_whole(model, self.filling)
        return model

    def save_config(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CONFIG).write_text(json.dumps(self.config, indent=2) + "\n")
        save_fixed(self._shown[1], folder)

    @staticmethod
    def load_config(folder: Path) -> Any:
        return json.loads((folder / CONFIG).read_text())
