"""Looks for DDP-Muon's loss with four workers and hundreds of times fewer bytes.

    .venv/bin/python benchmarks/frontier.py --stage trials --parallel 2    # one seed, many settings
    .venv/bin/python benchmarks/frontier.py --stage final --parallel 2     # the best, three seeds
    .venv/bin/python benchmarks/frontier.py --stage trials --model default    # a larger model
    .venv/bin/python benchmarks/frontier.py --table                    # trains nothing

The page (frontier.md) has the protocol; frontier_trials.csv has the trials, a line each.
"""

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import run_script, table
from stored_runs import (
    TUNING_SEED,
    Result,
    Spec,
    Store,
    flags_of,
    mean,
    megabytes,
    spread,
    study_parser,
    trained,
    write_page,
)

SEEDS = (0, 1, 2)
# A shape of zeros is the one of `model.shape`, as in the recipe adloco.
LARGER = (
    "model.hidden_size=0 model.num_layers=0 model.num_heads=0 model.intermediate_size=0 "
    "data.context_tokens=128"
)
PROBLEMS = {"small": (3_000_000, 64, ""), "default": (600_000, 128, LARGER)}
PROBLEMS["longer"] = (2_400_000, 128, LARGER)
"""Tokens, tokens of a sample, and what differs from the problem of bytes_to_loss.py."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One setting of an arm: a row of frontier_trials.csv."""

    arm: str
    model: str = "small"
    """A name in PROBLEMS."""
    batch: int = 16
    grows_to: int = 0
    """The batch at the end of the run, which grows by equal factors; 0: it is constant."""
    coupled: str = ""
    """`no` if the learning rate does not grow with the root of the batch."""
    lr: float = 8e-3
    sync_every: int = 0
    """H; 0 for ddp."""
    growth: float = 0.0
    outer_lr: float = 0.7
    momentum: float = 0.6
    """Nesterov momentum of the outer step."""
    more: str = ""
    """Further settings, as `section.key=value` separated by blanks."""
    final: int = 0
    """Its place among the final runs; 0: it has none."""

    @staticmethod
    def of(row: Mapping[str, str]) -> "Trial":
        types: dict[str, Callable[[str], Any]] = {
            **dict.fromkeys(("arm", "model", "coupled", "more"), str),
            **dict.fromkeys(("batch", "grows_to", "sync_every", "final"), int),
            **dict.fromkeys(("lr", "growth", "outer_lr", "momentum"), float),
        }
        return Trial(**{name: types[name](text) for name, text in row.items() if text})

    def spec(self, seed: int) -> Spec:
        tokens, context, problem = PROBLEMS[self.model]
        flags = {"inner.weight_decay": "0", "evaluation.every": "1000000", **flags_of(problem)}
        first, last = str(self.batch), str(self.grows_to)
        if self.batch != 16:
            flags |= dict.fromkeys(("batch.initial", "switch.max_micro_batch"), first)
        if self.grows_to:
            flags |= flags_of(
                f"batch.rule=ramp batch.first={first} batch.last={last} batch.initial={first} "
                f"batch.over_samples={tokens // context} batch.maximum={last} "
                f"switch.max_micro_batch={last}"
            )
        if self.grows_to and not self.coupled:
            flags |= {"learning_rate.coupling": "sqrt", "learning_rate.reference_batch": first}
        if self.growth:
            flags["method.sync_growth"] = f"{self.growth:g}"
        return Spec(
            arm=self.arm,
            inner="muon",
            inner_lr=self.lr,
            seed=seed,
            tokens=tokens,
            sync_every=self.sync_every or 40,
            outer_lr=self.outer_lr,
            momentum=self.momentum,
            problem=tuple((flags | flags_of(self.more)).items()),
        )

    @property
    def cells(self) -> list[str]:
        outer = [f"{self.outer_lr:g} / {self.momentum:g}", str(self.sync_every), f"{self.growth:g}"]
        own = outer if self.sync_every else ["-"] * 3
        batch = f"{self.batch} to {self.grows_to}" if self.grows_to else str(self.batch)
        more = ["lr not coupled"] if self.coupled else []
        return [self.arm, batch, f"{self.lr:g}", *own, ", ".join(more + self.more.split())]


def trials(model: str) -> list[Trial]:
    """All trials of a model, in the order of the file."""
    with Path(__file__).with_name("frontier_trials.csv").open(newline="") as file:
        found = [Trial.of(row) for row in csv.DictReader(file)]
    return [trial for trial in found if trial.model == model]


def finals(model: str) -> list[Trial]:
    """Those that have final runs, as the protocol says."""
    chosen = [trial for trial in trials(model) if trial.final]
    return sorted(chosen, key=lambda trial: trial.final)


def comparison(
    chosen: Sequence[Trial], seeds: Sequence[int], first_ddp: Result | None, runs: dict[str, Result]
) -> tuple[str, list[Result]]:
    """A row for each trial with stored runs, and these runs.

    Args:
        chosen: The trials.
        seeds: Those of the runs.
        first_ddp: The run whose bytes "fewer" compares with.
        runs: All stored runs; differences in loss are to the best ddp of the rows.
    """
    keys = {trial: [trial.spec(seed).key for seed in seeds] for trial in chosen}
    found = {trial: [runs[key] for key in own if key in runs] for trial, own in keys.items()}
    found = {trial: results for trial, results in found.items() if results}
    ddp = (mean(results, "final_loss") for trial, results in found.items() if trial.arm == "ddp")
    goal, all_bytes = min(ddp, default=float("nan")), bytes_of(first_ddp) or float("nan")
    rows = []
    for trial, results in found.items():
        losses = [one["final_loss"] for one in results if not one["diverged"]]
        cells = [*trial.cells, str(len(results))]
        if not losses:
            rows.append([*cells, "diverged", *["-"] * 5])
            continue
        loss, each = mean(results, "final_loss"), bytes_of(results[0])
        cells += [spread(losses) if len(losses) > 1 else f"{loss:.4f}"]
        cells += [f"{100 * (loss / goal - 1):+.1f}%", f"{mean(results, 'tail_loss'):.4f}"]
        cells += [megabytes(each), f"{all_bytes / each:.{1 if each > all_bytes / 10 else 0}f}x"]
        rows.append([*cells, f"{results[0]['curve']['syncs'][-1]:,}"])
    heads = ["arm", "batch", "lr", "outer", "H", "growth", "more", "seeds", "loss", "against ddp"]
    heads += ["tail's loss", "MB", "fewer", "syncs"]
    return table(heads, rows), [run for results in found.values() for run in results]


def bytes_of(result: Result | None) -> float:
    """Bytes of a run; 0 if there is none."""
    return result["curve"]["bytes"][-1] if result and result["curve"] else 0.0


def main(words: Sequence[str] | None = None) -> None:
    parser = study_parser(__doc__, Path("benchmarks/frontier.json"))
    parser.add_argument("--stage", choices=("trials", "final"), default="trials")
    parser.add_argument("--model", choices=tuple(PROBLEMS), default="small", help="what to train")
    options = parser.parse_args(words)
    if not options.table:
        specs = [trial.spec(TUNING_SEED) for trial in trials(options.model)]
        if options.stage == "final":
            specs = [trial.spec(seed) for seed in SEEDS for trial in finals(options.model)]
        trained(specs, options)
    runs = Store(options.json).read_some()
    parts: list[str] = []
    known: list[Result] = []
    for model in PROBLEMS:
        first_ddp = runs.get(finals(model)[0].spec(TUNING_SEED).key)
        for name, chosen, seeds in (
            ("final runs", finals(model), SEEDS),
            ("trials", trials(model), (TUNING_SEED,)),
        ):
            rows, found = comparison(chosen, seeds, first_ddp, runs)
            parts += [f"## The {model} model: {name}", rows] if found else []
            known += found
    write_page(options.json, "frontier", parts, known)


if __name__ == "__main__":
    run_script("frontier", main)
