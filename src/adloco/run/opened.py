"""A recipe's run as it is opened on these ranks: its task with the data, and the builder of its
model. Runs, probes and plans begin with it.
"""

from dataclasses import dataclass, field

import torch

from adloco.algorithms.method import Problem, Source
from adloco.algorithms.optimizers import OuterMean, OuterOptimizer
from adloco.config.sections import Recipe
from adloco.distributed.placement.placement import Placement
from adloco.models.attention import attends_to_all
from adloco.models.build import ModelBuilder
from adloco.models.source import Builder, num_bytes
from adloco.tasks.kinds.language_model_settings import LanguageModelSettings
from adloco.tasks.language_model import LanguageModel
from adloco.tasks.problem_task import ProblemTask
from adloco.tasks.task import Task

ADAMW_MOMENTS = 2


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A recipe's model, data and placement, opened before anything is trained."""

    recipe: Recipe
    placement: Placement
    task: Task
    builder: Builder
    precision: torch.dtype | None
    """Type of autocast; None: the model's own type."""
    notices: list[str] = field(default_factory=list)
    """Sentences for a person before the first round."""

    def train_source(self) -> Source:
        """The samples to train on."""
        method, seed = self.recipe.method, self.recipe.run.seed
        least = self.recipe.first_batch * method.num_trainers
        return self.task.train_source(method.num_workers, seed, least)

    def problem(self, data: Source) -> Problem:
        """The workers' training problem on these samples."""
        recipe, task, builder = self.recipe, self.task, self.builder
        return Problem(
            build_model=builder,
            fill=builder.filling,
            loss_fn=task.loss,
            compiled_loss_fn=task.compiled_loss if isinstance(task, LanguageModel) else None,
            data=data,
            replayable=_is_replayable(builder) and isinstance(recipe.task, LanguageModelSettings),
            tokens_per_sample=recipe.data.context_tokens,
            islands=task.islands
            if isinstance(task, ProblemTask)
            else max(1, len(recipe.data.islands)),
        )

    def checkpoint_bytes(self) -> int:
        """About how large a checkpoint is that is stopped within a round: the global parameters and
        outer optimizer of each trainer; parameters, AdamW's moments and residuals of each worker.

        After a round, workers have no parameters of their own. Muon has only one moment of hidden
        matrices, so its checkpoints are smaller.
        """
        recipe, host = self.recipe, torch.device("cpu")
        workers = recipe.method.num_workers
        each = (copies_of_worker(recipe) - 1) * workers + residual_copies(recipe, workers, host)
        return num_bytes(self.builder) * (outer_copies(recipe, host) + each)


def _is_replayable(builder: Builder) -> bool:
    """See `Problem.replayable`. Others may look at numbers on the device, or keep some on the host:
    mixtures of experts, rotations that follow the length, activations that are computed twice.
    """
    if not isinstance(builder, ModelBuilder) or builder.options.gradient_checkpointing:
        return False
    config = builder.config
    rotary = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kind = rotary.get("rope_type", "default")
    return attends_to_all(config) and kind in ("default", "linear", "llama3", "yarn")


def outer_copies(recipe: Recipe, device: torch.device) -> int:
    """The memory of all trainers' global parameters and outer optimizers on the device; of those
    that are not SGD, Adam's two moments are counted.

    Returns:
        A multiple of the model's size in its own data type; 0 if they are kept on the host.
    """
    if recipe.outer_memory.off_device(device.type):
        return 0
    outer, states = recipe.outer, ADAMW_MOMENTS
    if isinstance(outer, OuterMean):
        states = 0
    elif isinstance(outer, OuterOptimizer) and outer.optimizer == "SGD":
        states = 1 if outer.options.get("momentum") else 0
    return (1 + states) * _in_fp32(recipe) * recipe.method.num_trainers


def copies_of_worker(recipe: Recipe) -> int:
    """Parameters, gradients, AdamW's moments, and in a bf16 model what rounding takes off steps:
    each is as large as the model.
    """
    return 2 + ADAMW_MOMENTS + (recipe.model_options.dtype == "bf16")


def residual_copies(recipe: Recipe, workers: int, device: torch.device) -> int:
    """The memory of these workers' residuals on the device, as a multiple like that of
    `outer_copies`.
    """
    if recipe.outer_memory.off_device(device.type) or not recipe.keeps_residuals:
        return 0
    return _in_fp32(recipe) * workers


def _in_fp32(recipe: Recipe) -> int:
    """The size of a float32 copy of the model, as a multiple of the model's."""
    return 2 if recipe.model_options.dtype == "bf16" else 1
