"""Exports a run's model as a folder that transformers loads: weights, configuration, tokenizer, and
a model card with the recipe and the results.
"""

import json
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from adloco.config.recipe_text import to_toml
from adloco.data.transformers_tokenizer import PROBE
from adloco.errors import require
from adloco.metrics import validation
from adloco.models.attention import longest_context
from adloco.run.records import Records
from adloco.run.round_numbers import SUMMARY, summarise
from adloco.run.trained import Trained

NO_LIMIT = 1 << 24
"""More tokens than a text has that is tokenised here."""


def export(
    trained: Trained,
    folder: Path,
    *,
    license_id: str = "unknown",
    languages: Sequence[str] = (),
    labels: Sequence[str] = (),
) -> str:
    """Write the model's folder atomically.

    Args:
        trained: The run's model, which gets the names of `labels`.
        folder: A folder that does not exist.
        license_id: The licence that the model card states, by Hugging Face's name for it.
        languages: The languages that the card states, as ISO 639 codes; none if empty.
        labels: Names of a classifier's classes, in the order of their numbers; if empty, they are
            those of `model.name`, or LABEL_0, LABEL_1 and so on if it has another number of them.

    Returns:
        A sentence about the tokenizer if AutoTokenizer does not load it as it is, empty if it does.

    Raises:
        ValueError: The folder exists already, transformers cannot load such a model, or the labels
            are not one different name for each class.
    """
    source = trained.stored.recipe.model
    require(
        source.for_transformers,
        f"transformers cannot load the model of {trained.stored.folder} (model.source); its "
        f"weights are those of adloco.load({str(trained.stored.folder)!r}).model",
    )
    require(
        not folder.exists(), f"--to {str(folder)!r} exists already; give a folder that does not"
    )
    if labels:
        _name_classes(trained, labels)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        outside = Path(tempfile.mkdtemp(prefix=".exporting-", dir=folder.parent))
    except OSError as error:
        problem = f"cannot be made ({error.strerror}); give another folder"
        raise ValueError(f"--to {str(folder)!r} {problem}") from error
    temporary = outside / "model"
    temporary.mkdir()  # Others may read it, unlike what mkdtemp makes.
    try:
        model: Any = trained.model
        packed, end = trained.stored.recipe.task.packed, trained.stored.tokenizer.end_of_text
        tokenizer = trained.stored.tokenizer.to_transformers(whole=not packed)
        if not packed:
            tokenizer.padding_side = "right"
        # A classifier was trained with its configuration's, and reads off where padding begins.
        own = None if packed else getattr(model.config, "pad_token_id", None)
        if own is not None and own < len(tokenizer):
            tokenizer.pad_token = tokenizer.convert_ids_to_tokens(own)
        elif tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.convert_ids_to_tokens(end)
        # transformers' pipeline and generate stop at this id, and a text from packed documents
        # begins with it.
        generation: Any = getattr(model, "generation_config", None)
        for config in filter(None, (model.config, generation)):
            config.eos_token_id = end
            if packed and not source.weights:
                config.bos_token_id = end
        if generation:
            generation.pad_token_id = end
        model.save_pretrained(temporary)
        longest = longest_context(model.config)
        if packed and not source.weights:  # lm-eval-harness begins a text with it.
            tokenizer.bos_token = tokenizer.convert_ids_to_tokens(end)
        if not source.weights:  # It has never seen a later position.
            longest = min(longest, trained.stored.recipe.data.context_tokens)
        tokenizer.model_max_length = min(tokenizer.model_max_length, longest)
        tokenizer.save_pretrained(temporary)
        notice = _other_tokenizer(trained, temporary)
        card = temporary / "README.md"
        card.write_text(_card(trained, license_id, languages, notice))
        for file in temporary.iterdir():  # safetensors lets only the owner read its files.
            file.chmod(card.stat().st_mode)
        temporary.rename(folder)
    finally:
        shutil.rmtree(outside, ignore_errors=True)
    return notice


def _other_tokenizer(trained: Trained, folder: Path) -> str:
    """A sentence if AutoTokenizer loads another tokenizer from a folder than the run's.

    For some types of models, qwen2 for instance, it takes that of the type, whatever was saved.
    """
    import transformers

    recipe, own = trained.stored.recipe, trained.stored.tokenizer
    # A recipe has numbers and punctuation, in which tokenizers differ too, as in accents that are
    # characters of their own.
    texts = [PROBE, to_toml(recipe), "e\u0301"]
    expected = own.encode(texts) if recipe.task.packed else own.encode_whole(texts, NO_LIMIT)

    def is_own(name: str) -> bool:
        try:
            loaded = getattr(transformers, name).from_pretrained(folder, trust_remote_code=False)
            return bool(loaded(texts, verbose=False)["input_ids"] == expected)
        except Exception:  # Files that another class wrote, in any of its ways.
            return False

    if is_own("AutoTokenizer"):
        return ""
    found = f"AutoTokenizer gives other token ids for a {type(trained.model).__name__}"
    plain = "PreTrainedTokenizerFast"
    if is_own(plain):
        return f"{found}: use {plain}.from_pretrained(FOLDER), also as the tokenizer of pipeline."
    return f"{found}, and so does {plain}: use adloco.load(RUN).tokenizer."


def _name_classes(trained: Trained, labels: Sequence[str]) -> None:
    """Give the classes of a classifier these names, which transformers' pipeline then shows."""
    head = trained.stored.recipe.task.head
    config: Any = trained.model.config
    require(
        head == "AutoModelForSequenceClassification",
        f"--labels names the classes of a classifier, but the model of {trained.stored.folder} is "
        f"none ({head}); leave it out",
    )
    require(
        len(set(labels)) == len(labels) == config.num_labels and all(labels),
        f"--labels must be {config.num_labels} different names, one for each class, got "
        f"{','.join(labels)!r}",
    )
    config.id2label = dict(enumerate(labels))
    config.label2id = {label: number for number, label in enumerate(labels)}


def _card(trained: Trained, license_id: str, languages: Sequence[str], notice: str) -> str:
    """The model card."""
    recipe = trained.stored.recipe
    results = "\n".join(f"| {name} | {value} |" for name, value in _results(trained))
    # JSON is YAML, in which the language `no` would be a truth value without quotes.
    spoken = f"language: {json.dumps(list(languages))}\n" if languages else ""
    return f"""---
library_name: transformers
pipeline_tag: {recipe.task.pipeline}
license: {json.dumps(license_id)}
{spoken}tags: [adloco]
---

# {recipe.run.name}

Trained with adloco {metadata.version("adloco")}: trainer {trained.trainer} at checkpoint
`{trained.stored.checkpoint.name}` of a run of the recipe `{recipe.run.name}`.
It was trained on at most {recipe.data.context_tokens} tokens at a time.
Load it with `{recipe.task.head}.from_pretrained(FOLDER)`.
{notice}

## Results

Bytes are the payload of one worker's collectives with other workers.
What is 0 or was not measured is left out.

| | |
|---|---|
{results}

## Recipe

```toml
{_without_folders(to_toml(recipe))}```
"""


def _without_folders(text: str) -> str:
    """A recipe with the names of its files, without the folders of this machine."""
    return re.sub(r'"/(?:[^"\n]*/)?([^"/\n]*)/?"', r'"\1"', text)


def _results(trained: Trained) -> Iterator[tuple[str, str]]:
    """Name and value of each result for the model card: of the run until this checkpoint."""
    recipe = trained.stored.recipe
    parameters = sum(parameter.numel() for parameter in trained.model.parameters())
    rounds = trained.stored.algorithm["rounds_done"]
    records = Records(trained.stored.folder).read()
    summary = summarise(
        [record for record in records if record["round"] <= rounds],
        recipe.task.measures,
        num_parameters=parameters,
        recipe=recipe.run.name,
        trainer=trained.trainer,
    )
    yield "parameters", f"{parameters:,}"
    for measure in recipe.task.measures:
        metric = validation(measure)
        for which in ("final", "best"):
            value = summary[f"{which}_{metric.name}"]
            if value is not None:
                yield f"{which} {metric.axis}", metric.number(value)
    for key, metric in SUMMARY.items():
        if summary[key]:
            yield metric.axis, metric.number(summary[key])
