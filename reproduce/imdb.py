"""Trains a small BERT from scratch on 2,000 IMDB reviews with AdLoCo over two trainers. Compares
its accuracy on 1,000 test reviews with that of a bag of words.

    # Three runs of about a minute on two cores
    .venv/bin/python reproduce/imdb.py [--data ../shared/data] [--to runs/reproduce/imdb]

The folder of --data contains hub_like/stanfordnlp/imdb and tokenizers/bert-base-uncased. The bag of
words is naive Bayes on counts of the same tokens: once on the first 128 tokens of each review, as
BERT reads them, and once on all. Finished runs in the folder of --to are not repeated.
"""

import argparse
import json
from pathlib import Path

import numpy as np

import adloco
from adloco.data.data_settings import DataSettings
from adloco.data.rows import read_rows
from adloco.data.tokenizers import make_tokenizer

SEEDS = (0, 1, 2)
BERT = (
    "{ hidden_size = 128, num_hidden_layers = 2, num_attention_heads = 2, intermediate_size = 256 }"
)
SETTINGS = {
    "task.kind": "classification",
    "model.source": "transformers",
    "model.name": "bert",
    "model.pretrained": False,
    "model.overrides": BERT,
    "data.validation_split": "test",
    "batch.initial": 16,
    "batch.minimum": 16,
    "switch.max_micro_batch": 16,
    "inner.lr": 5e-4,
    "run.tokens": 1_000_000,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--to", type=Path, default=Path("runs/reproduce/imdb"))
    known = parser.parse_args()
    imdb = str(known.data / "hub_like/stanfordnlp/imdb")
    tokenizer = str(known.data / "tokenizers/bert-base-uncased")
    data = {"data.dataset": imdb, "data.tokenizer": tokenizer}
    accuracies = []
    for seed in SEEDS:
        folder = known.to / f"seed-{seed}"
        if not (folder / "summary.json").exists():
            own = {"run.seed": seed, "run.folder": str(folder)}
            adloco.train(str(Path(__file__).with_name("adloco.toml")), **SETTINGS, **data, **own)
        summary = json.loads((folder / "summary.json").read_text())
        accuracies.append(summary["final_val_accuracy"])
        print(
            f"AdLoCo, seed {seed}: accuracy {summary['final_val_accuracy']:.1%}, "
            f"{summary['syncs']} syncs, {summary['seconds']:.0f} s",
            flush=True,
        )
    print(f"AdLoCo: {np.mean(accuracies):.1%} ({min(accuracies):.1%} to {max(accuracies):.1%})")
    for longest in (128, 10**6):
        print(
            f"naive Bayes on {'all' if longest > 128 else longest} tokens: "
            f"{naive_bayes(imdb, tokenizer, longest):.1%}"
        )


def naive_bayes(imdb: str, tokenizer_name: str, longest: int) -> float:
    """Accuracy of multinomial naive Bayes with add-one smoothing."""
    tokenizer = make_tokenizer(tokenizer_name, ())

    def counts(split: str) -> tuple[np.ndarray, np.ndarray]:
        rows = list(
            read_rows(
                DataSettings(dataset=imdb, validation_split="test"),
                split,
                {"text": str, "label": int},
            )
        )
        table = np.zeros((len(rows), tokenizer.vocab_size), dtype=np.float32)
        for row, ids in enumerate(tokenizer.encode_whole([row["text"] for row in rows], longest)):
            np.add.at(table[row], ids, 1)
        return table, np.array([row["label"] for row in rows])

    (train, labels), (test, truth) = counts("train"), counts("validation")
    words = np.stack([train[labels == label].sum(0) + 1 for label in (0, 1)])
    scores = test @ np.log(words / words.sum(1, keepdims=True)).T + np.log(
        np.bincount(labels) / len(labels)
    )
    return float((scores.argmax(1) == truth).mean())


if __name__ == "__main__":
    main()
