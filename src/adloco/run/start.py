"""Sets up what a run needs before its first round: its folder and what describes it there, the
placement of its workers, its task with the data, its model, and the micro-batch that fits.
"""

import json
import os
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import torch
from torch import nn

from adloco.algorithms.adloco import AdLoCo
from adloco.algorithms.method import Execution, Problem
from adloco.config.finding import code_named
from adloco.config.recipe_text import to_toml, to_values
from adloco.config.sections import Recipe
from adloco.distributed.device_memory import free_memory, ran_out_of_memory
from adloco.distributed.launch.launcher import place
from adloco.distributed.placement.islands import island_of
from adloco.distributed.placement.placement import Placement
from adloco.errors import require
from adloco.models.fixed_values import changed_fixed
from adloco.models.source import Builder, entries_of, num_bytes
from adloco.run.budget import Budget
from adloco.run.environment import (
    choose_device,
    choose_precision,
    code_checksum,
    describe_environment,
)
from adloco.run.folder import ENVIRONMENT, MODEL, RECIPE, TOKENIZER
from adloco.run.json_files import write_json
from adloco.run.machine_folders import check_machine, in_turn
from adloco.run.memory_use import machine_bytes
from adloco.run.micro_batch_probe import probe
from adloco.run.opened import Opened, copies_of_worker, outer_copies, residual_copies
from adloco.run.own_problem import builder_of
from adloco.run.stored import StoredRun, shared_settings
from adloco.run.unusual import cut_batches, other_schedule, unread_streams, without_effect
from adloco.tasks.island_texts import IslandTexts, open_islands
from adloco.tasks.problem_task import ProblemTask
from adloco.tasks.task import Task, TaskData
from adloco.whole_file import all_to_disk, make_folder, write_text


def prepare_run(
    recipe: Recipe,
    placement: Placement,
    stored: StoredRun | None = None,
    problem: Problem | None = None,
) -> Opened:
    """Open the data, choose the model and find the micro-batch of a run, new or stored.

    Args:
        stored: The run to resume; None for a new run, which gets notices of what is unusual.
        problem: The model, data and loss of a run from Python; None: those of the recipe.
    """
    if stored is None:
        rate = replace(recipe.learning_rate, total_tokens=recipe.schedule_tokens())
        # Kept, because the numbers depend on it: another machine might choose otherwise.
        chosen = choose_precision(recipe.run.precision, placement.device)
        require(
            len({*placement.all_values(str(chosen))}) == 1,
            "the machines of the run differ in what run.precision auto takes; give it fp32 or bf16",
        )
        run = replace(recipe.run, precision="bf16" if chosen else "fp32")
        recipe = replace(recipe, learning_rate=rate, run=run)
    opened, notices = _open(recipe, placement, stored, problem), list[str]()
    opened.train_source()  # Refuses too little data before anything is measured.
    check_memory(recipe, opened.builder, placement)
    if recipe.switch.max_micro_batch == "auto":
        # Found once: the numbers depend on it, so a resumed run keeps it.
        found = probe(opened).max_micro_batch
        free_memory(placement.device)  # Of its model, before the run's are built.
        switch = replace(recipe.switch, max_micro_batch=found)
        opened = replace(opened, recipe=replace(recipe, switch=switch))
        notices.append(
            f"the largest micro-batch that fits is {found} (adloco probe shows what was measured)"
        )
    if stored is None:
        notices += [without_effect(recipe), cut_batches(recipe), other_schedule(recipe)]
        if problem:
            notices.append(unread_streams(problem.data.num_streams, recipe))
        notices.append(read_whole(opened.builder, placement))
        if not recipe.data.streaming:
            task = opened.task
            notices += [task.skipped(), Budget.of(recipe).many_passes(task.num_train_samples(0))]
    return replace(opened, notices=[*filter(None, notices)])


def open_recipe(recipe: Recipe) -> Opened:
    """Open a recipe on these ranks, for what is measured or counted without a run."""
    return _open(recipe, place_workers(recipe))


def _open(
    recipe: Recipe,
    placement: Placement,
    stored: StoredRun | None = None,
    problem: Problem | None = None,
) -> Opened:
    """Open the data and choose the model; the arguments are those of `prepare_run`."""
    if recipe.run.deterministic and placement.device.type == "cuda":
        # As an error where an operator has no such kernel: with a warning alone, attention would
        # take one that adds in no fixed order. cuBLAS asks for the variable.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    task = ProblemTask(problem) if problem else open_task(recipe, stored, placement)
    return Opened(
        recipe=recipe,
        placement=placement,
        task=task,
        builder=builder_of(problem, recipe, stored.folder if stored else None)
        if problem
        else model_builder(recipe, task, stored, placement),
        precision=choose_precision(recipe.run.precision, placement.device),
    )


def build_algorithm(parts: Opened) -> AdLoCo:
    """The run's trainers and workers, before their first round."""
    recipe = parts.recipe
    torch.manual_seed(recipe.run.seed)  # For models that draw random numbers as they compute.
    return AdLoCo(
        parts.problem(parts.train_source()),
        recipe.method,
        inner=recipe.inner,
        syncing=recipe.syncing,
        batching=recipe.batching,
        merging=recipe.merging,
        learning_rate=recipe.learning_rate,
        options=list(recipe.options.values()),
        execution=Execution(
            autocast=parts.precision,
            compile=recipe.run.compile,
            seed=recipe.run.seed,
            on_nonfinite=recipe.run.on_nonfinite,
        ),
        placement=parts.placement,
    )


def place_workers(recipe: Recipe) -> Placement:
    """Place the run's workers on the ranks.

    Raises:
        ValueError: The ranks differ in settings, kind of device or code, or the workers cannot be
            spread over them.
    """
    shape = recipe.placement
    device = choose_device(recipe.run.device)
    shared = shared_settings(recipe) | {
        "the kind of device": device.type,
        "the version of adloco": metadata.version("adloco"),
        "the code of adloco": code_checksum(),
        "data.islands": ", ".join(recipe.data.islands),  # Their settings may differ.
    }
    return place(
        recipe.method.living_workers,
        device,
        recipe.run.threads,
        shape.shard_size,
        shape.replica_size,
        must_agree=shared,
        timeout_seconds=recipe.run.timeout_seconds,
    )


def open_task(recipe: Recipe, stored: StoredRun | None, placement: Placement) -> Task:
    """Open the task with its data. Rank 0 writes the files on disk first; the others wait. Of
    islands with texts of their own, each rank opens those whose workers it has.

    stored: The run to resume, whose tokenizer is used; None for a new run.

    Raises:
        ValueError: The data does not fit the settings, or the text differs between ranks.
    """
    method, islands = recipe.method, len(recipe.data.islands)
    workers = placement.local(method.living_workers)
    own = sorted({island_of(worker, method.num_workers, islands) for worker in workers})

    def open_here() -> Task:
        tokenizer = stored.tokenizer if stored else None
        given = TaskData(recipe.data, recipe.evaluation, tokenizer)
        return open_islands(recipe.task, given, own, method.num_workers)

    made = open_here() if placement.is_rank_zero else None
    placement.agree(None)
    task = made or open_here()
    if isinstance(task, IslandTexts):
        task.gather_texts(placement.all_values)
        return task
    tokenizer = task.tokenizer.fingerprint()
    require(
        placement.agree(tokenizer) == tokenizer,
        f"data.tokenizer {recipe.data.tokenizer!r} differs between ranks; give all of them the "
        "same",
    )
    where = "data.dataset" if recipe.data.dataset else "data.path"
    require(
        task.matches_fingerprint(placement.agree(task.corpus)),
        f"the text of {where} differs between ranks; give all of them the same",
    )
    return task


def model_builder(
    recipe: Recipe, task: Task, stored: StoredRun | None, placement: Placement
) -> Builder:
    """The builder of the run's model.

    Args:
        task: The opened task, which completes the model's configuration.
        stored: The run to resume; None for a new run. A resumed run takes the configuration from
            its folder and no trained weights, because its checkpoint has them.

    Raises:
        ValueError: The model does not fit the task, or its weights differ between ranks.
    """
    build, ids = recipe.model.builder, task.tokenizer.vocab_size
    config = build.load_config(stored.folder / MODEL) if stored else recipe.model.config(ids)
    config = task.configure(config)
    require(
        task.tokenizer.vocab_size <= config.vocab_size,
        f"model.vocab_size must be >= {task.tokenizer.vocab_size}, the ids of the tokenizer, got "
        f"{config.vocab_size}",
    )
    builder = build(
        config=config,
        head=recipe.task.head,
        options=recipe.model_options,
        seed=recipe.run.seed,
        weights="" if stored else recipe.model.weights,
    )
    if stored:  # All ranks get rank 0's.
        asked = placement.is_rank_zero
        changed = placement.agree(
            changed_fixed(builder.whole, stored.folder / MODEL) if asked else ""
        )
        require(not changed, changed)
    # Each rank reads its own files.
    own = [builder.stored.digest(), json.dumps(entries_of(config), sort_keys=True)]
    require(
        own == placement.agree(own),
        "the weights or the configuration of model.name differ between ranks; give all of them "
        "the same",
    )
    return builder


def read_whole(builder: Builder, placement: Placement) -> str:
    """A notice that every rank reads the trained weights whole before it shards them; empty if it
    does not.
    """
    reason = builder.stored.only_whole if placement.shards > 1 else ""
    return (
        f"the weights of model.name {builder.weights!r} are read whole on each rank before they "
        f"are sharded: {reason}"
        if reason
        else ""
    )


def check_memory(recipe: Recipe, builder: Builder, placement: Placement) -> None:
    """Raise ValueError if the workers on this rank need more memory than its device has.

    It counts parameters, gradients, AdamW's moments, residuals and outer state, not activations.
    """
    method, device = recipe.method, placement.device
    workers = len(placement.local(method.living_workers))
    copies = copies_of_worker(recipe) * workers + residual_copies(recipe, workers, device)
    copies += outer_copies(recipe, device)
    parameters = sum(parameter.numel() for parameter in builder.parameters)
    needed = num_bytes(builder) * copies // placement.shards
    memory = machine_bytes()
    if device.type == "cuda":
        memory = torch.cuda.mem_get_info(device)[1] // placement.ranks_of_device
    require(
        needed <= memory,
        f"{workers} of the method.num_trainers x method.workers_per_trainer workers are on this "
        f"rank; with {parameters:,} parameters each they need "
        f"{needed / 2**30:.1f} GiB, but {device} has {memory / 2**30:.1f} GiB; use fewer workers "
        "or a smaller model",
    )


def problem_of_model(task: Task, model: nn.Module, device: torch.device) -> str:
    """A sentence that says why the model cannot be trained; empty if it can."""
    try:
        return task.validate_model(model, device)
    except (RuntimeError, LookupError, TypeError, AttributeError) as error:
        # Subclasses of RuntimeError are of memory or of other ranks.
        if isinstance(error, RuntimeError) and (
            type(error) is not RuntimeError or ran_out_of_memory(error)
        ):
            raise
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        return (
            f"the model cannot compute its outputs for a sample ({reason}); correct its sizes, "
            "or the code of a model or loss of your own"
        )


def write_description(parts: Opened, folder: Path) -> None:
    """Write environment, recipe, tokenizer and model, on each machine that does not see what rank 0
    wrote. Called on all ranks. ValueError if a machine has another run in its folder.
    """
    recipe, placement = parts.recipe, parts.placement
    written = placement.agree(to_toml(recipe))
    problem = ""

    def write() -> None:
        nonlocal problem
        if not placement.is_rank_zero:
            problem = check_machine(folder, written)
            described = (ENVIRONMENT, RECIPE, TOKENIZER, MODEL)
            if problem or all((folder / name).exists() for name in described):
                return
        make_folder(folder)
        write_json(
            folder / ENVIRONMENT,
            describe_environment(placement.device, parts.precision, recipe.run.seed)
            | {"notices": parts.notices, "code": code_named(to_values(recipe))},
        )
        write_text(folder / RECIPE, to_toml(recipe))
        (folder / TOKENIZER).mkdir(exist_ok=True)
        parts.task.tokenizer.save(folder / TOKENIZER)
        parts.builder.save_config(folder / MODEL)
        # Libraries write these files. A checkpoint has their checksums, so they must outlive it.
        all_to_disk(folder / TOKENIZER)
        all_to_disk(folder / MODEL)

    in_turn(placement, write)
    problems = list(filter(None, placement.all_values(problem)))
    require(not problems, "; ".join(problems))
