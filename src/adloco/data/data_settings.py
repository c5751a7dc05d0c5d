"""Settings of the text to train on (recipe section [data])."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from adloco.errors import require


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """What to train on."""

    path: str = ""
    """A text file, a folder of them, or jsonl/parquet; empty, and no dataset: the source of
    Python's own standard library.
    """
    dataset: str = ""
    """Instead of a path: a Hugging Face dataset, by its hub id (allenai/c4) or a local folder in
    the hub's layout. Needs adloco[datasets].
    """
    factory: str = ""
    """Instead of a path: a function of your own, as mypackage.data:rows. It returns an iterable of
    texts, or of dictionaries with the text column; the same ones at each call.
    """
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of data.factory, for instance { folder = "books" }."""
    config: str = ""
    """Configuration of the dataset, for instance en."""
    split: str = "train"
    """Split of the dataset to train on."""
    validation_split: str = ""
    """Split of the dataset to validate on. Empty: a part of the text to train on is held out."""
    streaming: bool = False
    """Fetch and tokenise a dataset as training goes on, in its own order, instead of all
    of it first.
    """
    samples: int = 0
    """Rows to take, from the first on (rows of a file, or files of text); 0: all. Only these are
    fetched.
    """
    validation_samples: int = 0
    """Rows of validation_split to take (0: all); without such a split, so many of the first rows
    are held out (0: validation_fraction says which).
    """
    bad_rows: Literal["error", "skip"] = "error"
    """What to do with rows that cannot be read or hold no text. skip: leave them out, count them,
    and show the counts.
    """
    fallback: str = ""
    """A second source, for when the first cannot be reached as a run begins: a path, or dataset:ID
    or dataset:ID:CONFIG.
    """
    text_column: str = "text"
    """Column that holds the text, of datasets, jsonl and parquet."""
    tokenizer: str = "bytes"
    """bytes, bpe:SIZE (trained on the text), or the folder or hub name of a Hugging Face tokenizer.
    """
    context_tokens: int = 128
    """Tokens of one sample."""
    validation_fraction: float = 0.05
    """Part of the rows held out: every k-th, or the tail of each where there are too few."""
    cache: str = "~/.cache/adloco"
    """Folder of the token caches."""

    def __post_init__(self) -> None:
        require(
            self.context_tokens >= 2, f"data.context_tokens must be >= 2, got {self.context_tokens}"
        )
        require(
            0 < self.validation_fraction <= 0.5,
            f"data.validation_fraction must be in (0, 0.5], got {self.validation_fraction}",
        )
        require(
            self.samples >= 0,
            f"data.samples must be >= 0, got {self.samples} (recipe section [data])",
        )
        require(
            self.validation_samples >= 0,
            f"data.validation_samples must be >= 0, got {self.validation_samples} (recipe section "
            "[data])",
        )
        require(
            sum(map(bool, (self.path, self.dataset, self.factory))) <= 1,
            "give one of data.path, data.dataset and data.factory, got "
            f"{self.path!r}, {self.dataset!r} and {self.factory!r}",
        )
        require(
            bool(self.factory) or not self.arguments,
            f"data.arguments are for a data.factory, got {dict(self.arguments)} without one; leave "
            "them out or name a function",
        )
        for name in ("config", "validation_split", "streaming"):
            given = getattr(self, name)
            require(
                bool(self.dataset) or not given,
                f"data.{name} is for a data.dataset, got {given!r} without one; leave it out or "
                "name a dataset",
            )
        require(
            bool(self.split),
            "data.split must name a split of the dataset, for instance train, got ''",
        )
        apart = not self.validation_split or self.validation_split != self.split
        require(
            apart,
            f"data.validation_split must be another split than data.split = {self.split!r}, or "
            "empty to hold out a part of that",
        )
        require(
            not self.streaming or bool(self.validation_split) or self.validation_samples > 0,
            "data.streaming needs text to validate on from the start; name data.validation_split, "
            "or the rows to hold out in data.validation_samples",
        )
        require(
            not self.samples
            or bool(self.validation_split)
            or self.samples > self.validation_samples,
            f"data.samples must be > data.validation_samples = {self.validation_samples}, which "
            f"are held out of them, got {self.samples}",
        )

        if self.fallback:
            self.fallback_settings()

    @property
    def source(self) -> str:
        """The source in words, as it stands in the recipe."""
        if self.dataset:
            return f"data.dataset {self.dataset!r}"
        if self.factory:
            return f"data.factory {self.factory!r}"
        return f"data.path {self.path!r}" if self.path else "the default corpus"

    def fallback_settings(self) -> "DataSettings":
        """The source that `fallback` names, read in the same way."""
        if self.fallback.startswith("dataset:"):
            dataset, _, config = self.fallback.removeprefix("dataset:").partition(":")
            return replace(
                self,
                path="",
                dataset=dataset,
                factory="",
                arguments={},
                config=config or self.config,
                fallback="",
            )
        return replace(
            self,
            path=self.fallback,
            dataset="",
            factory="",
            arguments={},
            config="",
            validation_split="",
            streaming=False,
            fallback="",
        )

    def at(self, path: str) -> "DataSettings":
        """Settings that read all rows of another path in the same way."""
        return replace(
            self,
            path=path,
            dataset="",
            factory="",
            arguments={},
            config="",
            validation_split="",
            streaming=False,
            samples=0,
            validation_samples=0,
        )
