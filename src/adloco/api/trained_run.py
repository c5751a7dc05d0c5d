"""`adloco.load`: a run read back from its folder, for notebooks and scripts."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property, partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from adloco.config.sections import Recipe
from adloco.data.tokenizers import Tokenizer
from adloco.errors import require
from adloco.metrics import Record
from adloco.run.folder import SUMMARY, finished, is_locked
from adloco.run.json_files import read_json
from adloco.run.records import Records
from adloco.run.stored import resumed_recipe
from adloco.run.trackers import flat
from adloco.run.trained import Trained, continued, evaluate, load_trained

if TYPE_CHECKING:
    import pandas
    from torch import nn

    from adloco.algorithms.method import Problem


def load(
    run: str | Path,
    *,
    trainer: int | None = None,
    round: int | None = None,
    best: bool = False,
    problem: Problem | None = None,
    trust_recipe: bool = False,
) -> TrainedRun:
    """Read a run back. Its model is loaded when it is first asked for.

    Args:
        run: The run's folder.
        trainer: The trainer whose model is wanted; None: the one with the lowest validation loss.
        round: The round of the checkpoint that is wanted; None: the newest checkpoint.
        best: True for the checkpoint with the lowest validation loss, as `--best` of the command
            line; `run.keep_best` keeps it.
        problem: The problem that the run was trained on by `adloco.train(problem=...)`, for its
            model; None for other runs.
        trust_recipe: True if the folder's recipe may name code that the run did not begin with.

    Raises:
        ValueError: The folder has no run, one that this version cannot read, or one whose recipe
            names such code; or both a round and the best are wanted.
    """
    require(not best or round is None, f"give either best or a round, got best and round {round}")
    wanted: int | Literal["best"] | None = "best" if best else round
    return TrainedRun(
        Path(run), trainer=trainer, round=wanted, problem=problem, trust_recipe=trust_recipe
    )


class TrainedRun:
    """A run in its folder, finished or stopped.

    Attributes:
        folder: The run's folder.
        recipe: Every setting of the run.
    """

    def __init__(
        self,
        folder: Path,
        *,
        trainer: int | None = None,
        round: int | Literal["best"] | None = None,
        problem: Problem | None = None,
        trust_recipe: bool = False,
    ) -> None:
        """Read the recipe; the arguments are those of `load`, with `best` as a round."""
        self.folder = folder
        self.recipe: Recipe = resumed_recipe(folder, (), trust_recipe=trust_recipe)
        self._load = partial(
            load_trained, self.folder, trainer, round, problem, trust_recipe=trust_recipe
        )

    @property
    def records(self) -> list[Record]:
        """The lines of metrics.jsonl, one for each round; docs/run-folder.md explains them."""
        return Records(self.folder).read_whole()

    @property
    def summary(self) -> dict[str, Any]:
        """The content of summary.json; ValueError if the run has not ended."""
        return read_json(finished(self.folder) / SUMMARY)

    @property
    def finished(self) -> bool:
        """True if the run has spent its budget."""
        return (self.folder / SUMMARY).is_file()

    def dataframe(
        self, rows: Literal["rounds", "trainers", "workers", "steps"] = "rounds"
    ) -> pandas.DataFrame:
        """The records as a table of pandas.

        Args:
            rows: What a row is: a round, with all numbers of its line (those of trainers and
                workers by names such as `trainer-0/noise_scale`); a trainer or a worker in a
                round; or an inner step of a worker, with its loss.

        Raises:
            ValueError: pandas is not installed, or there are no such rows.
        """
        try:
            import pandas
        except ImportError as error:
            raise ValueError(
                "dataframe() needs pandas, which is not installed; pip install 'adloco[pandas]', "
                "or use records"
            ) from error
        return pandas.DataFrame.from_records(list(self._rows(rows)))

    def _rows(self, rows: str) -> Iterator[Record]:
        kinds = ("rounds", "trainers", "workers", "steps")
        require(rows in kinds, f"rows must be one of {', '.join(kinds)}, got {rows!r}")
        if rows == "steps":
            yield from Records(self.folder).steps()
            return
        for record in self.records:
            if rows == "rounds":
                yield flat(record)
            else:
                place = {name: record[name] for name in ("round", "tokens")}
                yield from (place | row for row in record[rows])

    @cached_property
    def _trained(self) -> Trained:
        return self._load()

    @property
    def model(self) -> nn.Module:
        """The model with the global parameters of one trainer, on the run's device."""
        return self._trained.model

    @property
    def trainer(self) -> int:
        """The trainer whose parameters `model` has."""
        return self._trained.trainer

    @property
    def tokenizer(self) -> Tokenizer:
        """The run's tokenizer: `encode` takes texts, `decode` token ids."""
        return self._trained.stored.tokenizer

    def evaluate(
        self, data: str | Path | None = None, *, windows: int | None = None
    ) -> dict[str, float]:
        """Evaluate the model, as `adloco evaluate` does.

        Args:
            data: A file or folder of which all rows are used; None: the run's own validation rows.
            windows: Windows to evaluate a language model on, evenly spaced; 0: all; None: as many
                as in training.

        Returns:
            Each measure by name, for instance loss, perplexity and bits_per_byte.
        """
        return evaluate(self._trained, None if data is None else str(data), windows)[0]

    def generate(
        self, prompt: str, *, tokens: int = 200, temperature: float = 0.8, seed: int = 0
    ) -> str:
        """Continue a text with the model, as `adloco generate` does; return the whole text.

        Args:
            prompt: The text.
            tokens: Most tokens to add.
            temperature: 0 takes the most likely token each time.
            seed: Seed of the draw.
        """
        pieces = continued(
            self._trained, prompt, max_tokens=tokens, temperature=temperature, seed=seed
        )
        return "".join(pieces)

    def _facts(self) -> dict[str, str]:
        """Facts of the run and how far it has come, in words."""
        records = self.records
        last = records[-1] if records else {"round": 0, "tokens": 0}
        losses = [record["val_loss"] for record in records if record["val_loss"] is not None]
        unfinished = "running" if is_locked(self.folder) else "stopped"
        return {
            "recipe": self.recipe.run.name,
            "state": "finished" if self.finished else unfinished,
            "rounds": f"{last['round']}",
            "tokens": f"{last['tokens']:,}",
            "val_loss": f"{losses[-1]:.4f}" if losses else "-",
        }

    def __repr__(self) -> str:
        facts = ", ".join(f"{name} {value}" for name, value in self._facts().items())
        return f"<adloco run {str(self.folder)!r}: {facts}>"

    def _repr_html_(self) -> str:
        facts = {"run": str(self.folder), **self._facts()}
        rows = (f"<tr><th>{name}</th><td>{escape(text)}</td></tr>" for name, text in facts.items())
        return f"<table>{''.join(rows)}</table>"
