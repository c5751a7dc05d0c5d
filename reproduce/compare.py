"""Studies of the default model: figures 1 and 2 of arXiv 2508.18182, and what each setting does.

.venv/bin/python reproduce/compare.py NAME [--section.key VALUE ...]
    # NAME: a key of STUDIES below; three seeds of each arm where nothing else is said

Further words are those of `adloco compare` (`sweep`, `ablate`), which trains what is missing in
runs/reproduce/NAME; for instance figure 1 for MicroLlama on C4 on GPUs:

.venv/bin/python reproduce/compare.py figure-1 --run.folder runs/figure-1-c4
    --run.tokens 100000000 --model.shape microllama --data.dataset allenai/c4 --data.config en
    --data.streaming true --data.validation_split validation --data.validation_samples 1000
    --data.context_tokens 512 --data.tokenizer keeeeenw/MicroLlama

adloco.toml and diloco.toml beside this file are the recipes as they were when these studies were
made. What is printed after a comparison is `analyses.py`.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import analyses
from analyses import COUPLED, EVALUATE_EVERY, TARGETS, TOKENS

from adloco.cli.main import main
from adloco.config.setting_words import take_settings

ADLOCO, DILOCO = (Path(__file__).with_name(f"{name}.toml") for name in ("adloco", "diloco"))
ADAMW = "--inner.optimizer adamw --inner.lr 2e-3 --wire.format fp32"
SLOWER = "--outer.options '{ momentum = 0.6, nesterov = true }'"
TUNED = f"{DILOCO}@{SLOWER}"
TOGETHER = "--method.num_trainers 1 --method.workers_per_trainer 4 --merge.policy none"
PAPER = "adloco-paper-small"
LONG = f"--run.tokens {TOKENS} --inner.optimizer adamw --inner.lr 2e-3"
FIGURE_1 = [
    f"AdLoCo={ADLOCO}@{ADAMW} --outer.lr 0.7",
    f"DiLoCo 0.9={DILOCO}",
    f"DiLoCo 0.6={TUNED}",
    "LocalSGD=local-sgd",
]
LINK = "--link 100mbit,20ms"


@dataclass(frozen=True, kw_only=True)
class Study:
    """A command over several arms."""

    arms: Sequence[str]
    common: str = LONG
    command: str = "compare"
    seeds: int = 3
    then: Callable[[Path], None] = lambda folder: None
    """Prints what follows, from the study's folder."""
    kept: str = ""
    """File beside this one to which the rows of the comparison are copied, unless settings are
    changed on the command line.
    """


STUDIES = {
    # All arms: AdamW inside, float32 between workers, two workers at first (AdLoCo: two trainers
    # that merge), the same first batch. DiLoCo with the published Nesterov momentum and a tuned
    # one.
    "figure-1": Study(arms=FIGURE_1, common=f"{LONG} {LINK}"),
    "longer": Study(arms=FIGURE_1[:2], common=f"{LONG} --run.tokens 1200000 {LINK}"),
    # The default recipe beside its yardsticks. Runs as short as these reach a lower loss with an
    # outer momentum of 0.6 than with the published 0.9.
    "default-recipe": Study(
        arms=[
            "adloco",
            f"adloco (AdamW, fp32)=adloco@{ADAMW} --outer.lr 0.7 --run.tokens 1200000",
            "single",
            f"diloco (momentum 0.9)={DILOCO}",
            f"diloco (momentum 0.6)={TUNED}",
            "local-sgd",
        ],
        common="",
    ),
    # Figures 1 and 2 as published, at a size for two CPU cores: outer SGD with a rate of 0.5 and
    # no momentum, four workers, the plug-in norm test. All arms take 240 inner steps from the
    # same parameters; DiLoCo's batch is the 2 of each worker with which AdLoCo's trainers begin.
    # The same for who has GPUs and the hub: adloco compare adloco-paper diloco-paper --seeds 5
    "as-published": Study(
        arms=[
            f"AdLoCo={PAPER}",
            f"DiLoCo={PAPER}@{TOGETHER} --batch.rule constant --batch.initial 8 "
            "--switch.mode always",
            f"without merging={PAPER}@--merge.policy none",
            f"one trainer of four workers, norm test={PAPER}@{TOGETHER} --batch.initial 8",
        ],
        common=LINK,
        seeds=5,
        kept="as_published.csv",
    ),
    # Figure 2: without adaptive batches, merging, switch mode, all three (docs/studies.md). With
    # the published eta and AdamW requests grow far above the 4 samples that fit.
    "ablation": Study(
        command="ablate",
        arms=[str(ADLOCO)],
        common=f"{LONG} --batch.eta 0.8",
    ),
    # The norm test's tolerance and switch mode's multiplier: 4 samples fit, so n decides whether
    # requests from 5 to 12 are cut to 4 or accumulated.
    "eta-and-n": Study(
        command="sweep",
        arms=[str(ADLOCO)],
        common="--batch.eta 0.5 1 2 --switch.multiplier 1.5 2 3 --run.tokens 300000 " + ADAMW,
        kept="eta_and_n.csv",
    ),
    # Does the estimate of the number of communications hold? Constant batches give S_min and
    # E_min; from these follow the steps, syncs and samples of adaptive batches (docs/plan.md).
    "estimate": Study(
        arms=[
            *(
                f"constant {batch}=local-sgd@--batch.initial {batch} --evaluation.every {evaluate}"
                for batch, evaluate in EVALUATE_EVERY.items()
            ),
            *(
                f"eta {eta}=local-sgd@--batch.rule norm-test --batch.eta {eta} "
                "--batch.max_growth 2 --batch.initial 8 --batch.minimum 4 --batch.maximum 256 "
                "--evaluation.every 3"
                for eta in analyses.ETAS
            ),
        ],
        common=f"{LONG} --method.sync_every {analyses.EVERY} {COUPLED} "
        f"--learning_rate.shape constant --targets {','.join(TARGETS)}",
        then=analyses.show_estimates,
    ),
}


def run(name: str, more: Sequence[str]) -> int:
    """Train and compare the arms of a study, and return the exit code."""
    study = STUDIES[name]
    words = [*study.common.split(), "--seeds", str(study.seeds)]
    words += ["--run.folder", f"runs/reproduce/{name}", *more]
    if code := main([study.command, *study.arms, *words]):
        return code
    changed = take_settings(more)[0]
    folder = Path(dict(changed).get("run.folder", f"runs/reproduce/{name}"))
    if study.kept and not changed:
        analyses.keep_rows(folder, Path(__file__).with_name(study.kept))
    study.then(folder)
    return 0


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in STUDIES:
        sys.exit(f"compare: name one of {', '.join(STUDIES)}")
    sys.exit(run(sys.argv[1], sys.argv[2:]))
