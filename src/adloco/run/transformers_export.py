"""Exports a run's model as a folder that transformers loads: weights, configuration, tokenizer, and
a model card with the recipe and the results.
"""

import shutil
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

from adloco.config.recipe_text import to_toml
from adloco.errors import require
from adloco.run.checkpoint import make_readable
from adloco.run.records import Records, summarise
from adloco.run.trained import Trained


def export(trained: Trained, folder: Path) -> None:
    """Write the model's folder atomically.

    Raises:
        ValueError: The folder exists already, or transformers cannot load such a model.
    """
    source = trained.stored.recipe.model
    require(
        source.for_transformers,
        f"transformers cannot load the model of {trained.stored.folder} (model.source); take its "
        f"weights from {trained.stored.checkpoint}",
    )
    require(
        not folder.exists(), f"--to {str(folder)!r} exists already; give a folder that does not"
    )
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=".exporting-", dir=folder.parent))
    try:
        model: Any = trained.model
        tokenizer = trained.stored.tokenizer.to_transformers(
            whole=not trained.stored.recipe.task.packed
        )
        end = trained.stored.tokenizer.end_of_text
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.convert_ids_to_tokens(end)
        # transformers' pipeline and generate stop at these ids.
        model.config.eos_token_id = end
        if getattr(model, "generation_config", None) is not None:
            model.generation_config.eos_token_id = model.generation_config.pad_token_id = end
        model.save_pretrained(temporary)
        tokenizer.model_max_length = min(
            tokenizer.model_max_length,
            getattr(model.config, "max_position_embeddings", tokenizer.model_max_length),
        )
        tokenizer.save_pretrained(temporary)
        (temporary / "README.md").write_text(_card(trained))
        make_readable(temporary)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _card(trained: Trained) -> str:
    """The model card."""
    recipe, records = trained.stored.recipe, Records(trained.stored.folder).read()
    parameters = sum(parameter.numel() for parameter in trained.model.parameters())
    summary = summarise(
        records,
        recipe.task.measures,
        num_parameters=parameters,
        recipe=recipe.run.name,
        trainer=trained.trainer,
    )
    results = "\n".join(
        f"| {name} | {value:,.4f} |" if isinstance(value, float) else f"| {name} | {value} |"
        for name, value in summary.items()
    )
    return f"""---
library_name: transformers
pipeline_tag: {recipe.task.pipeline}
tags: [adloco]
---

# {recipe.run.name}

Trained with adloco {metadata.version("adloco")}: trainer {trained.trainer} at checkpoint
`{trained.stored.checkpoint.name}` of a run of the recipe `{recipe.run.name}`.
Load it with `{recipe.task.head}.from_pretrained(FOLDER)`.

## Results

Losses are in nats; bytes are the payload of one worker's reductions with other workers.

| | |
|---|---|
{results}

## Recipe

```toml
{to_toml(recipe)}```
"""
