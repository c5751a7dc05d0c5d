"""Text of `adloco train` before the first round: the model, the amount of data and of traffic."""

import math
import socket
import sys

from adloco.algorithms.dropout import uses_dropout
from adloco.distributed.placement.threads import num_cores
from adloco.distributed.wire.wire_format import bytes_per_value
from adloco.metrics import ROUND
from adloco.report.readable import counted, span
from adloco.rules.batch_rules.constant import ConstantBatch
from adloco.rules.merge_policies.no_merge import NoMerge
from adloco.run.budget import steps_for
from adloco.run.model_flops import peak_flops
from adloco.run.training_run import TrainingRun


def opening_lines(run: TrainingRun) -> list[str]:
    """Up to five lines about a run that begins or continues: numbers, and what will happen."""
    sizes = _sizes(run)
    workers = f"{span(sizes)} worker{'s' if max(sizes) > 1 else ''}"
    device = f"{run.device} ({num_cores()} cores)" if run.device.type == "cpu" else str(run.device)
    if run.device.type == "cuda":
        worker = next(iter(run.algorithm.workers.values()))
        device += ", compiled" if worker.engine.compiles else ", not compiled"
        if not (worker.engine.compiles or uses_dropout(worker.model)):
            device += " (it is with run.compile true)"
        if peak_flops(run.device) is None:
            device += " (its peak FLOPs are not known, so there is no MFU)"
    return [
        f"{run.algorithm.num_parameters:,} parameters; {counted(len(sizes), 'trainer')} of "
        f"{workers}; on {device}",
        _budget(run),
        *filter(None, [_sent(run)]),
        *_explained(run),
    ]


def joined_line(run: TrainingRun) -> str:
    """Line that a rank other than 0 prints once on a machine of its own."""
    placement, here = run.placement, sorted(run.algorithm.workers)
    workers = f"worker{'s' if len(here) != 1 else ''} {', '.join(map(str, here))}"
    return (
        f"rank {placement.rank} of {placement.num_ranks} has joined the run in {run.folder} on "
        f"{socket.gethostname()}: it trains {workers} of {run.recipe.method.num_workers} on "
        f"{run.device}; rank 0 shows the view"
    )


def _sizes(run: TrainingRun) -> list[int]:
    """The number of workers of each trainer, now: merges and losses change it."""
    return [len(trainer.worker_ids) for trainer in run.algorithm.trainers.values()]


def _budget(run: TrainingRun) -> str:
    """The budget, how often it goes through the data, and how many rounds that makes."""
    recipe = run.recipe
    limits = {name: limit for name, limit in recipe.run.limits.items() if limit}
    words = [f"{limit:,} {name.replace('_', ' ')}" for name, limit in limits.items()]
    rounds, limit = _rounds(run)
    samples = 0 if recipe.data.streaming else run.task.num_train_samples(0)
    if "tokens" in limits and 0 < samples < sys.maxsize:
        text = samples * recipe.data.context_tokens
        words[0] += f" ({limits['tokens'] / text:,.2g} epochs over {text:,} tokens of text)"
    every = f"of {counted(run.algorithm.sync_every, 'inner step')}"
    if rounds is not None:
        # A merge leaves fewer trainers, so a round takes fewer tokens after it.
        changes = ["more after a merge"] if _merges(run) and limit == "tokens" else []
        if recipe.method.sync_growth and limit in ("tokens", "inner_steps"):
            changes.append("fewer because rounds become longer")
        elif recipe.run.tokens and not isinstance(recipe.batch, ConstantBatch):
            falls = ", more if it falls" if limit == "tokens" else ""
            changes.append(f"fewer if the batch grows{falls}")
        many = counted(rounds, "more round" if run.algorithm.state.rounds_done else "round")
        words.append(f"{many} {every}{'; ' * bool(changes)}{', '.join(changes)}")
    return "budget: " + ", ".join(words)


def _merges(run: TrainingRun) -> bool:
    """True if trainers may still merge."""
    return len(_sizes(run)) > 1 and not isinstance(run.recipe.merge, NoMerge)


def _rounds(run: TrainingRun) -> tuple[int | None, str]:
    """Rounds that are left of the budget if the batch and H stay as they are, the one in progress
    included, and the limit that ends them; None if that may be syncs, and no workers sync yet.
    """
    algorithm, limits, state = run.algorithm, run.recipe.run.limits, run.algorithm.state
    if limits["syncs"] and not state.will_sync:
        return None, "syncs"
    samples = math.ceil(limits["tokens"] / run.recipe.data.context_tokens) - state.samples
    every = algorithm.sync_every
    steps = {
        "tokens": steps_for(
            samples, per_step=algorithm.samples_per_inner_step, fewest=algorithm.fewest_samples
        ),
        "inner_steps": limits["inner_steps"] - state.inner_steps,
        "rounds": (limits["rounds"] - state.rounds_done) * every,
        "syncs": (limits["syncs"] - state.syncs) * every,
    }
    left, limit = min((left, name) for name, left in steps.items() if limits[name])
    return math.ceil(left / every), limit


def _sent(run: TrainingRun) -> str:
    """Bytes that a worker will send, beside data-parallel training; empty for one worker."""
    recipe, sizes = run.recipe, _sizes(run)
    rounds, _ = _rounds(run)
    if sum(sizes) == 1:
        return ""
    if max(sizes) == 1 and not _merges(run):
        return "no parameters are sent: each trainer has one worker, and trainers do not merge"
    syncing, parameters = recipe.syncing, run.algorithm.num_parameters
    shown = ROUND["bytes_communicated"].text
    each = bytes_per_value(syncing.wire) * parameters
    if _merges(run):
        rest = "; each merge sends more"
    elif rounds is None:
        rest = ""
    else:
        # Blocks that are not full, and numbers beside the parameters, are not counted.
        longer = recipe.method.sync_growth and isinstance(recipe.batch, ConstantBatch)
        about = "at most" if longer else "about"
        whole = "more" if run.algorithm.state.rounds_done else "in all"
        rest = f", {about} {shown(each * rounds)} {whole}"
    first = "no parameters are sent until trainers merge; from then on " if max(sizes) == 1 else ""
    return f"{first}a sync sends {shown(each)} per worker{rest}"


def _explained(run: TrainingRun) -> list[str]:
    """Two sentences about what AdLoCo does and the other methods do not."""
    lines = []
    if _merges(run):
        lines.append(
            "each trainer trains a model of its own, until several merge into one whose workers "
            "sync after every round"
        )
    if run.recipe.batch_cap is not None:
        lines.append(
            "the batch follows the gradient: the more its samples differ, the more of them the "
            "next steps take"
        )
    return lines
