"""A run in its folder: rounds, records and checkpoints. The caller owns the loop: `for record in
run.rounds(): ...`.
"""

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from shutil import rmtree
from typing import Any

from adloco.algorithms.evaluation import Share, Sums
from adloco.algorithms.method import Problem
from adloco.algorithms.reports import RoundReport
from adloco.algorithms.state_parts import RUN
from adloco.config.recipe_text import named_settings
from adloco.config.sections import Recipe
from adloco.distributed.parallel.layers import free_gathered
from adloco.distributed.plain_state import state_bytes
from adloco.errors import NonFiniteLossError, OutOfMemoryError, require
from adloco.metrics import Record
from adloco.run import checkpoint, out_of_memory
from adloco.run.budget import Budget, RoundSize
from adloco.run.changes import keep_settings, own_limits, skipped_by, with_longer_schedule
from adloco.run.checkpoint import BestRound
from adloco.run.environment import rng_state, set_rng_state
from adloco.run.folder import (
    CHECKPOINTS,
    SUMMARY,
    check_free,
    check_links,
    claimed,
    has_trained,
    locked,
    not_begun,
)
from adloco.run.json_files import write_json
from adloco.run.machine_folders import fetch_folder, in_turn
from adloco.run.memory_use import Memory
from adloco.run.model_flops import use_per_token
from adloco.run.opened import Opened
from adloco.run.own_problem import recipe_of, resume_call
from adloco.run.records import Records
from adloco.run.recovery import clear_unusable
from adloco.run.round_numbers import round_record, summarise
from adloco.run.run_progress import Clock, Progress
from adloco.run.saving import Copies, Saving
from adloco.run.start import (
    build_algorithm,
    place_workers,
    prepare_run,
    problem_of_model,
    write_description,
)
from adloco.run.starts import Kind, Point, Starts, failure_cost
from adloco.run.stored import (
    check_corpus,
    deciding_settings,
    folder_facts,
    recovered_run,
    resumed_recipe,
)
from adloco.run.trackers import Trackers
from adloco.run.trained import text_sample
from adloco.run.unusual import other_schedule
from adloco.tasks.island_texts import fewer_texts, of_island
from adloco.whole_file import remedy

COPIED_PARAMETERS = 100_000_000
"""On a CPU, processes whose models have more parameters than this, all workers together, write
checkpoints from the state where it is, and training waits: a copy would take as much memory again.
"""


class TrainingRun:
    """One run in its folder."""

    def __init__(self, parts: Opened, folder: Path, copies: Copies | None) -> None:
        """Build the trainers and their models, and write nothing; `copies` as in `create`."""
        self.recipe = recipe = parts.recipe
        self.folder = folder
        self.placement = placement = parts.placement
        self.device = placement.device
        self.task = parts.task
        self.notices = parts.notices
        """Sentences for a person before the first round."""
        again = resume_call(recipe, folder)
        self.records = Records(folder, again)
        self._best = BestRound()
        self.saving = Saving(
            folder,
            placement,
            recipe.run.keep_checkpoints,
            self._best.spared,
            # A checkpoint counts with its part `run`, so the records have all its rounds.
            before_run=self.records.to_disk,
            resume=again,
        )
        self.copies = copies
        self._told = False  # To stop; by this process, not by another rank.
        self.resumed = False
        self.newest: Record = {}
        """The newest line of metrics.jsonl; empty before the first round."""
        self.starts = Starts(folder, writes=placement.is_rank_zero)
        self.algorithm = build_algorithm(parts)
        self._budget = Budget.of(recipe)
        first = next(iter(self.algorithm.workers.values()))
        devices = placement.num_ranks / placement.ranks_of_device
        self._use = use_per_token(first.model, recipe.data.context_tokens, self.device, devices)
        """MFU for each token in a second; None if it is not known."""
        self._memory = Memory(self.device)
        self._trackers = Trackers(
            recipe.run.tracker_names if placement.is_rank_zero else [], folder
        )
        self._start_id = placement.agree(uuid.uuid4().hex)
        self._saves = 0
        self._described: dict[str, Any] = {}
        self._bytes_checkpoint = 0
        self._clock = Clock()

    @staticmethod
    def create(
        recipe: Recipe, problem: Problem | None = None, copies: Copies | None = None
    ) -> "TrainingRun":
        """A new run. If it fails before its first checkpoint, it leaves no files in its folder.

        Args:
            problem: The model, data and loss of a run from Python; None: those of the recipe.
            copies: Keeps copies of the run's state in memory; None: there are none.
        """
        recipe = recipe_of(problem, recipe) if problem else recipe
        placement = place_workers(recipe)
        if placement.is_rank_zero:
            check_free(recipe)  # Before the text is tokenised, which can take long.
        parts = prepare_run(recipe, placement, problem=problem)
        with claimed(recipe) if placement.is_rank_zero else nullcontext("") as folder:
            return TrainingRun._begin(parts, Path(placement.agree(str(folder))), copies)

    @staticmethod
    def _begin(parts: Opened, folder: Path, copies: Copies | None) -> "TrainingRun":
        """A new run in an empty folder, whose lock rank 0 holds."""
        named = replace(parts.recipe, run=replace(parts.recipe.run, folder=str(folder)))
        parts = replace(parts, recipe=named)
        run = TrainingRun(parts, folder, copies)
        algorithm, first = run.algorithm, next(iter(run.algorithm.workers.values()))
        short = run._budget.within_first_round(run._next_round().steps, algorithm.sync_every)
        run.notices += [short] if short else []
        algorithm.state.skip_samples(run.recipe.data.skip_samples)
        # On every rank, because the ranks of an island compute a sharded model together.
        problem = problem_of_model(run.task, first.model, run.device)
        free_gathered(first.model)
        require(not problem, problem)
        try:
            write_description(parts, folder)
            if copies:
                copies.place(folder, run.placement, run.recipe.run.copy_every)
            run._described = folder_facts(folder)
            run.saving.save(run._checkpoint_name(), run._checkpoint)
        except OSError as error:
            raise ValueError(
                f"the run cannot begin in {folder} ({error.strerror or error}); {remedy(error)}, "
                "or use another --run.folder"
            ) from error
        return run

    @staticmethod
    def resume(
        folder: Path,
        flags: Sequence[tuple[str, Any]] = (),
        kind: Kind = "resume",
        problem: Problem | None = None,
        copies: Copies | None = None,
        *,
        trust_recipe: bool = False,
    ) -> "TrainingRun":
        """A run that continues from its newest good checkpoint, bit for bit unless a setting
        changes that decides its numbers (`Facts.resume`).

        A run that was killed before its first checkpoint begins again.

        Args:
            flags: (section.key, value) of settings that change; see `stored.changeable`.
            kind: What starts.jsonl says of it.
            problem: As in `create`.
            copies: As in `create`; what it has kept is used where no checkpoint is newer.
            trust_recipe: As in `resumed_recipe`.

        Raises:
            ValueError: The folder is in use or has no good checkpoint, or the settings cannot work.
        """
        check_links(folder)
        fetch_folder(folder)
        recipe = resumed_recipe(folder, flags, trust_recipe=trust_recipe)
        placement = place_workers(recipe)
        limit = placement.agree(out_of_memory.limit(folder))
        recipe = replace(recipe, switch=recipe.switch.at_most(limit))
        # Locked before anything is changed, so that a run in use is left as it is.
        with locked(folder) if placement.is_rank_zero else nullcontext():
            if placement.agree(not_begun(folder)) and not placement.any(has_trained(folder)):
                in_turn(placement, lambda: rmtree(folder / CHECKPOINTS, ignore_errors=True))
                recipe, _ = with_longer_schedule(folder, recipe, {"recipe": {}}, samples=0)
                new = prepare_run(recipe, placement, problem=problem)
                return TrainingRun._begin(new, folder, copies)
            kept = copies.parts if copies else {}
            stored, found = recovered_run(folder, recipe, placement, kept)
            parts = prepare_run(stored.recipe, placement, stored, problem)
            run = TrainingRun(parts, folder, copies)
            run.resumed = True
            run.saving.seconds = stored.about["checkpoint_seconds"]
            run._clock = Clock(stored.about["seconds"])
            check_corpus(stored, run.task)
            run.algorithm.load_state_dict({**found.parts, RUN: stored.algorithm})
            before = own_limits(folder)
            if not placement.agree((folder / SUMMARY).exists()):
                state, size = run.algorithm.state, run._next_round()
                run._budget.check_lowered(state, size, before, folder)
            # Ranks that remain after a failure drop workers also when only the report is left.
            if run.finished and kind == "resume":
                stored.require_unchanged(run.progress().budget)
            run.algorithm.state.skip_samples(skipped_by(stored.changes))
            run.notices += [change.text for change in stored.changes]
            run.notices += fewer_texts(recipe.data, recipe.method)
            if run.recipe.run.limits != before:
                run.notices += filter(None, [other_schedule(run.recipe, resumed=True)])
            if limit:
                run.notices.append(f"memory ran out before: micro-batches of at most {limit}")
            set_rng_state(stored.about["rng"], run.device)
            received = sum(placement.all_values(found.bytes_received))
            run._bytes_checkpoint = stored.about["bytes_checkpoint"] + received
            run._described = folder_facts(folder)
            run.saving.newest = found.newest_on_disk
            in_turn(placement, lambda: keep_settings(stored))
            sentences = clear_unusable(folder / CHECKPOINTS, found, placement)
            if placement.is_rank_zero:
                at = run._point(run.algorithm.state.saved_samples)
                dropped = stored.samples * stored.recipe.data.context_tokens - at.tokens
                run.starts.resume(at, run.records.newest(), kind, dropped)
                run.notices += sentences
                run.notices += run.records.cut(run.algorithm.state.rounds_done)
            # Those of other ranks' folders can be older: they do not count.
            run.newest = placement.agree(run.records.newest() if placement.is_rank_zero else {})
            if stored.recipe.run.keep_best:
                run._best.add(placement.agree(run.records.read() if placement.is_rank_zero else []))
            if copies:
                # Last: if a rank fails before, the others need what they have kept.
                copies.place(folder, placement, run.recipe.run.copy_every, found.checkpoint.name)
                if found.checkpoint.name != found.newest_on_disk:
                    # A rank that failed has taken copies along, and the next one may fail at once.
                    run._keep_state(copies=copies.made, saves=not copies.made, save=found.save)
        return run

    def rounds(self) -> Iterator[Record]:
        """Train until the budget is spent or `stop` is called.

        Yields:
            Each round's line of metrics.jsonl, after it was written.
        """
        if self.finished:
            return
        tokens = self.algorithm.state.samples * self.recipe.data.context_tokens
        with (
            locked(self.folder) if self.placement.is_rank_zero else nullcontext(),
            self._trackers.following(named_settings(self.recipe), tokens),
        ):
            if self.placement.is_rank_zero:
                require(
                    self.records.newest().get("round", 0) == self.newest.get("round", 0),
                    f"another process has trained the run in {self.folder} since it was read; "
                    "resume it again",
                )
                # A run made longer is not finished any more.
                (self.folder / SUMMARY).unlink(missing_ok=True)
            self.starts.begin(self._point(self._samples()))
            with self._clock.running():
                try:
                    for record in self._train():
                        self._trackers.log(record)
                        yield record
                except NonFiniteLossError as error:  # Of a round, or of the state to be saved.
                    raise NonFiniteLossError(f"{error}{self.saving.advice}") from error
                finally:
                    self.saving.wait()

    def _point(self, samples: int) -> Point:
        """The run's progress, with so many samples."""
        return Point(
            round=self.algorithm.state.rounds_done,
            tokens=samples * self.recipe.data.context_tokens,
            seconds=round(self._clock.seconds, 3),
        )

    def _samples(self) -> int:
        """Samples that all workers have trained on, those of a round in progress included. Called
        on all ranks.
        """
        state, placement = self.algorithm.state, self.placement
        begun = placement.total(state.begun_samples)
        return state.samples + round(begun / placement.ranks_per_worker)

    def _train(self) -> Iterator[Record]:
        samples, seconds = self._samples(), 0.0
        while not self.finished:
            began = time.monotonic()
            report = self._round()
            seconds += time.monotonic() - began
            if report is None:
                ends, self._told = self.placement.any(self._told), False
                # This rank may leave, and take its disk along. What is on disk is not copied again:
                # a rank with only the disk's save would not fit to others with another one.
                made = self.copies is not None and self.copies.made
                copies = made and not self.saving.has(self._checkpoint_name())
                self._keep_state(copies=copies, saves=True, last=ends)
                if ends:
                    return
                continue
            trained = (self.algorithm.state.samples - samples) * self.recipe.data.context_tokens
            record = self._record(report, tokens_per_second=trained / seconds)
            samples, seconds = self.algorithm.state.samples, 0.0
            if self.placement.is_rank_zero:
                self.records.add(record, report)
            self.newest = record
            # Every round is added, also one that is due already: later ones are compared with it.
            best = self.recipe.run.keep_best and self.placement.agree(self._best.add([record]))
            due = best or report.round % self.recipe.run.checkpoint_every == 0
            self.saving.look()
            saves = self.finished or due or self.saving.missing or self._alone_at(report.round)
            copies = self.copies is not None and self.copies.due(
                report.round, saves=saves, last=self.finished
            )
            self._keep_state(copies=copies, saves=saves, last=self.finished)
            yield record

    def _alone_at(self, round: int) -> bool:
        """True if copies are due after this round, and no other island could keep one."""
        every, placement = self.recipe.run.copy_every, self.placement
        alone = placement.num_ranks == placement.ranks_per_worker
        return alone and every > 0 and round % every == 0

    def _round(self) -> RoundReport | None:
        try:
            size = self._next_round()
            with self.saving.overdue(self.recipe.run.checkpoint_seconds, self.algorithm.stop):
                return self.algorithm.round(
                    size.steps, self._memory.phase, final_samples=size.final
                )
        except OutOfMemoryError as error:
            raise out_of_memory.noted(
                self.folder, self.algorithm.state.rounds_done, error
            ) from error

    def _next_round(self) -> RoundSize:
        """The size of the next round, or of the one in progress."""
        return self._budget.next_round(
            self.algorithm.state,
            per_step=self.algorithm.samples_per_inner_step,
            fewest=self.algorithm.fewest_samples,
            sync_every=self.algorithm.sync_every,
        )

    def stop(self) -> None:
        """End after the inner steps in progress and save; `resume` continues from there."""
        self._told = True
        self.algorithm.stop()

    @property
    def finished(self) -> bool:
        """True if the budget is spent."""
        return self._budget.spent(self.algorithm.state)

    def progress(self) -> Progress:
        """Tokens and seconds so far, including those of the round in progress."""
        state = self.algorithm.state
        part, words = self._budget.used(state)
        return Progress(
            tokens=state.samples_so_far * self.recipe.data.context_tokens,
            rows=self.task.rows_read(),
            seconds=self._clock.seconds,
            part=part,
            budget=words,
            inner_step=state.begun_steps,
            round_steps=state.round_steps,
        )

    def finish(self) -> dict[str, Any]:
        """Write summary.json and return its content. Call it in the first process only."""
        summary = summarise(
            self.records.read(),
            self.recipe.task.measures,
            num_parameters=self.algorithm.num_parameters,
            recipe=self.recipe.run.name,
        )
        summary |= failure_cost(self.starts.lines, summary["seconds"])
        summary["corpus"] = self.task.corpus
        summary["sample"] = text_sample(self)
        write_json(self.folder / SUMMARY, summary)
        return summary

    def _record(self, report: RoundReport, tokens_per_second: float) -> Record:
        evaluated = self.finished or report.round % self.recipe.evaluation.every == 0
        measured = self._evaluate() if evaluated else {}
        return round_record(
            report,
            self.recipe,
            self.progress(),
            tokens_per_second=tokens_per_second,
            mfu=None if self._use is None else tokens_per_second * self._use,
            bytes_checkpoint=self._bytes_checkpoint,
            memory=self._memory,
            measured=measured,
        )

    def _evaluate(self) -> Mapping[int, Mapping[int, Sums]]:
        """Sums of the task's measures, by trainer and island."""
        at_once = self.recipe.switch.at_most(self.algorithm.state.pass_limit).at_once

        def share_of(island: int) -> Share:
            task = of_island(self.task, island)
            return lambda model, *place: task.measure(model, self.device, at_once, *place)

        with self._memory.phase("evaluation"):
            return self.algorithm.evaluate_islands(share_of)

    def _keep_state(self, *, copies: bool, saves: bool, last: bool = False, save: str = "") -> None:
        """Keep copies of the state as it is now in the memory of others, and write a checkpoint.

        last: It is the last of this start, which is waited for; `save` is as in `_checkpoint`.
        """
        if not (copies or saves):
            return
        held = self.algorithm.num_parameters * len(self.algorithm.workers)
        large = self.device.type == "cpu" and held > COPIED_PARAMETERS
        waits = last or (large and not copies)  # Else there are copies, which can be written later.
        content = cache(lambda: self._checkpoint(copy=copies or not waits, sent=copies, save=save))
        name = self._checkpoint_name()
        if copies and self.copies:
            self.copies.keep(name, content(), self.placement)
        if saves:
            others = self.copies.for_disk if self.copies else {}
            self.saving.try_to_save(name, lambda: {**content(), **others}, last=last, waits=waits)
            if last:
                self.starts.stop(self._point(self._samples()))

    def _checkpoint_name(self) -> str:
        """By rounds and inner steps so far."""
        state = self.algorithm.state
        # Those of the worker that is furthest: the same name on all ranks.
        begun = int(self.placement.largest(state.begun_steps))
        return checkpoint.name_of(state.rounds_done, state.inner_steps + begun)

    def _checkpoint(
        self, *, copy: bool = False, sent: bool = False, save: str = ""
    ) -> dict[str, Any]:
        """The parts of a checkpoint that this process writes, as another save or as the one that
        has this state already; NonFiniteLossError if the state has infinite numbers.

        copy: Their tensors are copies, which can be read while training continues.
        sent: Other islands get copies, which the state counts: a run that resumes from them has
            sent them.
        """
        self.algorithm.state.require_finite(self.placement)
        about = {
            "rng": rng_state(self.device),
            "seconds": self._clock.seconds,
            "checkpoint_seconds": self.saving.seconds,
            "corpus": self.task.corpus,
            "recipe": deciding_settings(self.recipe),
            "tokens": self.recipe.run.tokens,
            "records": self.records.digests(),
        } | self._described
        with self._memory.phase("checkpoint"):
            parts = self.algorithm.state_parts(copy=copy)
        if self.placement.is_rank_zero:
            parts[RUN] = {"run": about, "algorithm": parts[RUN]}
        self._saves += 1  # On all ranks, which make checkpoints together.
        if sent:
            self._bytes_checkpoint += round(self.placement.total(state_bytes(parts)))
        about["bytes_checkpoint"] = self._bytes_checkpoint
        return {
            name: {**part, checkpoint.SAVE: save or f"{self._start_id}-{self._saves}"}
            for name, part in parts.items()
        }
