"""Settings of the text to train on (recipe section [data])."""

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from adloco.errors import SettingError, require, require_range, require_setting
from adloco.setting import setting

OF_ISLAND = (
    *("path", "dataset", "arguments", "config", "split", "validation_split", "samples"),
    *("validation_samples", "validation_fraction", "bad_rows", "text_column"),
)
"""Settings that an island with a text of its own can have for itself."""


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """The text to train and validate on, and how it is tokenised."""

    path: str = setting("", resume="free", of_rank=True, equal="data", aliases=("data",))
    """A text, jsonl or parquet file, or a folder of such files. If path, dataset and factory are
    all empty: the source code of Python's standard library.
    """
    dataset: str = setting("", resume="free", of_rank=True, equal="data")
    """Instead of path: a Hugging Face dataset, as a hub id (allenai/c4) or as a local folder in the
    hub's layout. Needs pip install 'adloco[datasets]'.
    """
    factory: str = setting("", resume="free", of_rank=True, equal="data", code=True)
    """Instead of a path: a function of your own, as mypackage.data:rows. It returns an iterable of
    texts, or of dictionaries with the text column; the same ones at each call.
    """
    arguments: Mapping[str, Any] = setting(factory=dict, resume="free", of_rank=True, equal="data")
    """Arguments of data.factory, for instance { folder = "books" }."""
    config: str = setting("", equal="data")
    """Configuration of the dataset, for instance en."""
    split: str = setting("train", equal="data")
    """Split of the dataset to train on."""
    validation_split: str = setting("", equal="validation windows")
    """Split of the dataset to validate on. Empty: rows of data.split are held out."""
    streaming: bool = False
    """true: fetch and tokenise the dataset during training, in its own order; false: fetch and
    tokenise all of it before training.
    """
    samples: int = setting(0, equal="data")
    """Number of rows to take, counted from the first; each text file is one row. 0: all. Other rows
    are not fetched.
    """
    skip_samples: int = setting(0, resume="grows")
    """Samples that every worker leaves out at the beginning of its stream. A larger number on
    resume leaves out the difference from there on, to get past data with which training fails.
    """
    validation_samples: int = setting(0, equal="validation windows")
    """With validation_split: number of its rows to take; 0: all. Without: number of first rows to
    hold out; 0: use validation_fraction.
    """
    bad_rows: Literal["error", "skip"] = setting("error", resume="recorded")
    """Treatment of rows that cannot be read or have no text. error: stop; skip: leave them out, and
    show how many there were. A stream that a bad row has stopped is resumed with skip.
    """
    text_column: str = setting("text", equal="data")
    """Column with the text, in datasets, jsonl and parquet files."""
    tokenizer: str = setting("bytes", equal="tokenizer")
    """bytes, bpe:SIZE (byte-level BPE trained on the first 10,000 texts), or the folder or hub name
    of a Hugging Face tokenizer.
    """
    context_tokens: int = setting(
        128, equal="data", aliases=("context", "max_length", "seq_len", "seq_length")
    )
    """Length of a sample, in tokens. Texts that are classified are cut to this length."""
    validation_fraction: float = setting(0.05, equal="validation windows")
    """Fraction of the rows to hold out if neither validation_split nor validation_samples is set:
    spread evenly over the rows, or, if there are too few rows for one, of the end of each.
    """
    islands: Mapping[str, Mapping[str, Any]] = setting(
        factory=dict, resume="free", of_rank=True, equal="data"
    )
    """Islands that have texts of their own, by name, each with the settings of this section that
    are others there: { c = { path = "texts/c" }, english = { path = "texts/english" } }. Workers
    are divided among them in this order; a process opens the texts of its own workers alone. On
    machines of their own, { c = {}, english = {} } is enough, with data.path on the line of each.
    Empty: all workers read the same text.
    """
    cache: str = setting("", resume="free", of_rank=True)
    """Folder of the caches of tokenised text, for language models alone. Empty: adloco in the
    folder that XDG_CACHE_HOME names, or ~/.cache/adloco without that variable.
    """

    def __post_init__(self) -> None:
        # 1 is for problems from Python, whose samples need not be texts (`require_context`).
        require_setting(self.context_tokens >= 1, self, "context_tokens", "must be >= 2")
        require_range(self, "validation_fraction", above=0, at_most=0.5)
        require_range(self, "skip_samples", "samples", "validation_samples", at_least=0)
        require(
            sum(map(bool, (self.path, self.dataset, self.factory))) <= 1,
            "give one of data.path, data.dataset and data.factory, got "
            f"{self.path!r}, {self.dataset!r} and {self.factory!r}",
        )
        if self.arguments and not self.factory:
            problem = f"are for {{factory}}, got {dict(self.arguments)} without one; leave them out"
            raise SettingError(self, "arguments", f"{problem} or name a function")
        of_dataset = ["config", "validation_split", "streaming"]
        if self.split != "train" and not self.islands:
            of_dataset.append("split")
        for name in of_dataset:
            given = getattr(self, name)
            if given and not self.dataset:
                problem = f"is for {{dataset}}, got {given!r} without one; leave it out"
                raise SettingError(self, name, f"{problem} or name a dataset")
        split = "must name a split of the dataset, for instance train"
        require_setting(bool(self.split), self, "split", split)
        require_setting(
            self.validation_split != self.split,
            self,
            "validation_split",
            "must be another split than {split=}, or empty to hold out a part of that",
        )
        require(
            not self.streaming or bool(self.validation_split) or self.validation_samples > 0,
            "data.streaming needs text to validate on from the start; set data.validation_split, "
            "or the number of rows to hold out in data.validation_samples",
        )
        require_setting(
            not self.samples
            or bool(self.validation_split)
            or self.samples > self.validation_samples,
            self,
            "samples",
            "must be > {validation_samples=}, which are held out of them",
        )

        if self.islands:
            self._check_islands()

    def _check_islands(self) -> None:
        names = [*self.islands]
        require_setting(
            len(names) > 1 and all(re.fullmatch(r"[\w.-]+", name) for name in names),
            self,
            "islands",
            "must name two islands or more, with letters, digits, _, - and .",
        )
        require(
            not self.streaming,
            "data.islands and data.streaming do not go together: the text of each island is "
            "compared on resume, and that of a stream is not known; set data.streaming to false",
        )
        require(
            not self.tokenizer.startswith("bpe:"),
            f"data.tokenizer {self.tokenizer!r} would be trained on a text that the islands do not "
            "share; use bytes, or the folder or hub name of a tokenizer",
        )
        for name in names:
            try:
                self.of_island(name)
            except ValueError as error:
                text = error.named("data") if isinstance(error, SettingError) else str(error)
                raise ValueError(f"island {name!r} of data.islands: {text}") from error

    def of_island(self, name: str) -> "DataSettings":
        """The settings of one of the `islands`, which has a text of its own.

        Raises:
            ValueError: The table of the island has other settings than OF_ISLAND, or wrong values.
        """
        own = self.islands[name]
        for key, value in own.items():
            require(
                key in OF_ISLAND,
                f"{key} cannot be given for an island; settings that can: {', '.join(OF_ISLAND)}",
            )
            kind = type(getattr(self, key))
            require(
                isinstance(value, kind) and not isinstance(value, bool),
                f"{key} must be of the type {kind.__name__}, got {value!r}",
            )
        return replace(self, islands={}, **own)

    def texts(self) -> "list[DataSettings]":
        """The settings of each text: one, or those of the islands."""
        return [self.of_island(name) for name in self.islands] or [self]

    def require_context(self) -> None:
        """Raise ValueError if samples are too short for a text, in which tokens follow others."""
        require(
            self.context_tokens >= 2,
            f"data.context_tokens must be >= 2, got {self.context_tokens} (recipe section [data])",
        )

    @property
    def source(self) -> str:
        """The setting that names the source, for messages."""
        if self.islands:
            return f"data.islands {', '.join(self.islands)}"
        if self.dataset:
            return f"data.dataset {self.dataset!r}"
        if self.factory:
            return f"data.factory {self.factory!r}"
        return f"data.path {self.path!r}" if self.path else "the default corpus"

    @property
    def name(self) -> str:
        """A short name of the source, for the name of a folder."""
        path = str(Path(self.path).absolute()) if self.path else ""
        return "-".join(self.islands) or self.dataset or self.factory or path or "stdlib"

    def at(self, path: str) -> "DataSettings":
        """Settings for another path, which is read as these say; all its rows are held out."""
        return DataSettings(
            path=path,
            validation_samples=sys.maxsize,
            bad_rows=self.bad_rows,
            text_column=self.text_column,
            tokenizer=self.tokenizer,
            context_tokens=self.context_tokens,
            cache=self.cache,
        )
