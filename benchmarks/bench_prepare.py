"""The part of bench.py about text: `adloco prepare` against the tokenizer alone."""

import json
import os
import tempfile
from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from bench_pairs import Row, in_turns

from adloco.data.data_settings import DataSettings
from adloco.data.preparation import prepare
from adloco.data.standard_library import StandardLibrary
from adloco.data.tokenizers import make_tokenizer
from adloco.distributed.placement.one_process import num_cores

TOKENIZER = "bpe:4096"


def prepare_text(*, quick: bool) -> Iterator[Row]:
    """Python's standard library, from a file to a complete token cache, against `tokenizers` on the
    same texts in memory, both with all cores.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    texts = [str(row["text"]) for _, row in StandardLibrary("text").read(["text"], 0)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text_file = folder / "texts.jsonl"
        with text_file.open("w") as file:
            file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
        made = make_tokenizer(TOKENIZER, texts[:200]).to_transformers(whole=False)
        made.save_pretrained(folder / "tokenizer")
        caches = count()
        sides = {
            "tokenizer": partial(made.backend_tokenizer.encode_batch_fast, texts),
            "prepare": lambda: _prepared(folder, text_file, f"cache-{next(caches)}"),
        }
        times = in_turns(sides, 1 if quick else 4, warm_up=0)
    megabytes = sum(map(len, texts)) / 1e6
    yield Row.of(
        f"`adloco prepare` of {megabytes:.0f} MB with {TOKENIZER}",
        f"`tokenizers` on the texts in memory, {num_cores()} threads",
        times["prepare"],
        times["tokenizer"],
    )


def _prepared(folder: Path, text_file: Path, cache: str) -> Any:
    data = DataSettings(
        path=str(text_file), tokenizer=str(folder / "tokenizer"), cache=str(folder / cache)
    )
    for state in prepare(data, num_cores()).states():
        last = state
    assert last.complete, "the whole text is prepared"
