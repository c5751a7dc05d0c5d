"""A new run that begins with the parameters of another run's model (`model.from_run`)."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from torch import Tensor, nn

from adloco.algorithms.method import Problem
from adloco.algorithms.model_state import Replica, copy_all, state_buffers
from adloco.algorithms.state_parts import trainer_part
from adloco.data.transformers_tokenizer import PRETRAINED
from adloco.distributed.placement.placement import Placement
from adloco.errors import require
from adloco.models.source import Builder, computed_by
from adloco.run.folder import TOKENIZER
from adloco.run.own_problem import builder_of
from adloco.run.trained import stored_builder, stored_counters, stored_trainer
from adloco.tasks.task import Task
from adloco.whole_file import checksums


class WarmStart:
    """The model of another run, for the models of this process to begin with."""

    def __init__(
        self, folder: Path, task: Task, placement: Placement, problem: Problem | None
    ) -> None:
        """Read the model: that of the trainer with the lowest validation loss, from the newest
        checkpoint.

        Args:
            folder: Folder of the other run.
            task: The task of the new run.
            placement: Where its workers live.
            problem: The problem of a new run from Python.

        Raises:
            ValueError: The folder cannot be read, the tokenizers differ, or the ranks do not see
                the same model.
        """
        stored, trainer, outer = stored_trainer(folder, None, None)
        saved = folder / TOKENIZER / PRETRAINED
        require(
            stored.tokenizer.fingerprint() == task.tokenizer.fingerprint(),
            f"the run in model.from_run {str(folder)!r} has another tokenizer; set data.tokenizer "
            f"to {str(saved) if saved.exists() else 'bytes'!r}",
        )
        prefix = f"{trainer_part(trainer)}."
        files = checksums(stored.checkpoint).items()
        self.origin = {
            "run": str(folder.resolve()),
            "checkpoint": stored.checkpoint.name,
            "trainer": trainer,
            "checksums": {name: found for name, found in files if name.startswith(prefix)},
        }
        """Source of the first parameters, as environment.json records it."""
        self.notice = (
            f"begins with the parameters of trainer {trainer} in {stored.checkpoint}, with new "
            "optimizers"
        )
        """One sentence for a person before the first round."""
        same = placement.agree(self.origin["checksums"]) == self.origin["checksums"]
        require(
            same, "the model of model.from_run differs between ranks; give all of them the same run"
        )
        self._folder, self._problem = folder, problem
        self._stored, self._trainer = stored, trainer
        self._averaged: Sequence[Tensor] = [*outer["params"], *outer["buffers"]]

    def require_same_model(self, builder: Builder) -> None:
        """Raise ValueError unless a configuration computes what the other run's does: shapes do
        not tell heads, for instance.
        """
        of_other = stored_builder(self._stored).config
        mine, other = (computed_by(each) for each in (builder.config, of_other))
        differing = [
            f"{name} is {other.get(name)!r} there and {mine.get(name)!r} here"
            for name in sorted({*mine, *other})
            if mine.get(name) != other.get(name)
        ]
        require(
            not differing,
            f"the model of model.from_run {str(self._folder)!r} is another one "
            f"({'; '.join(differing[:3])}); give the other settings of [model] and the task of "
            "that run",
        )

    def of(self, problem: Problem) -> Problem:
        """The problem, with models that begin with these parameters."""

        def build() -> nn.Module:
            model = problem.build_model()
            self._check_shape(model)
            if problem.fill is None:
                self._fill(model, model)
            return model

        def fill(model: nn.Module, part: nn.Module) -> None:
            assert problem.fill is not None
            problem.fill(model, part)
            self._fill(model, part)

        return replace(problem, build_model=build, fill=fill if problem.fill else None)

    def _check_shape(self, model: nn.Module) -> None:
        found, own = self._tensors(model)
        shapes, wanted = ([tuple(tensor.shape) for tensor in each] for each in (found, own))
        differing = [
            f"{name} is {there} there and {here} here"
            for name, there, here in zip(Replica.of(model).names, shapes, wanted, strict=False)
            if there != here
        ]
        differing += [f"it has {len(shapes)} tensors there and {len(wanted)} here"]
        require(
            shapes == wanted,
            f"the model of model.from_run {str(self._folder)!r} has another shape ({differing[0]})"
            "; give the other settings of [model] and the task of that run",
        )

    def _fill(self, model: nn.Module, part: nn.Module) -> None:
        """Copy the parameters and buffers that a part of the model owns, or all for the model."""
        own = {*part.parameters(), *part.buffers()}
        pairs = zip(*self._tensors(model), strict=True)
        chosen = [(source, target) for source, target in pairs if target in own]
        copy_all([source for source, _ in chosen], [target for _, target in chosen])
        if untrained := _untrained(model):  # Otherwise the other run's model is not built.
            pairs = zip(self._untrained, untrained, strict=True)
            require(
                all(there.equal(here.to(there)) for there, here in pairs if here in own),
                f"the model of model.from_run {str(self._folder)!r} has parameters that are not "
                "trained, and this one has others; give run.seed "
                f"{self._stored.recipe.run.seed}, by which they were drawn",
            )

    def _tensors(self, model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
        """The tensors of the other run's model, and those of this one in the same order."""
        mine, counters = Replica.of(model), state_buffers(model, floating=False)
        found, own = [*self._averaged], [*mine.params, *mine.buffers]
        if counters:
            found, own = [*found, *self._counters], [*own, *counters]
        return found, own

    @cached_property
    def _counters(self) -> Sequence[Tensor]:
        return stored_counters(self._stored, self._trainer)

    @cached_property
    def _untrained(self) -> Sequence[Tensor]:
        """The other run's parameters that are in no checkpoint, as it has built them."""
        stored, own = self._stored, self._problem
        builder = builder_of(own, stored.recipe, self._folder) if own else stored_builder(stored)
        return _untrained(builder.whole())

    def release(self) -> None:
        """Free the memory of the other run's model, once all models have been built."""
        self._averaged = ()
        vars(self).pop("_counters", None)
        vars(self).pop("_untrained", None)


def _untrained(model: nn.Module) -> list[Tensor]:
    return [each for each in model.parameters() if not each.requires_grad]
