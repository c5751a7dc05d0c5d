"""Figure 1 of arXiv 2508.18182: perplexity of AdLoCo over steps, against DiLoCo with the published
Nesterov momentum (0.7 / 0.9) and a tuned one (0.6), and against LocalSGD; on every axis.

.venv/bin/python reproduce/figure_1.py
    # 12 runs, three seeds of each arm

All arms: AdamW inside, float32 between workers, two workers at first (AdLoCo: two trainers that
merge), the same first batch, 600k tokens of the default corpus. Further words are those of `adloco
compare`, for instance for MicroLlama on C4 on GPUs:

.venv/bin/python reproduce/figure_1.py --run.folder runs/figure-1-c4 --run.tokens 100000000
    --model.shape microllama --data.dataset allenai/c4 --data.config en --data.streaming true
    --data.validation_split validation --data.validation_samples 1000 --data.context_tokens 512
    --data.tokenizer keeeeenw/MicroLlama
"""

import sys
from pathlib import Path

from adloco.cli.main import main

RECIPE = Path(__file__).with_name("adloco.toml")
DILOCO = Path(__file__).with_name("diloco.toml")
ARMS = [
    f"AdLoCo={RECIPE}@--inner.optimizer adamw --inner.lr 2e-3 --wire.format fp32 --outer.lr 0.7",
    f"DiLoCo 0.9={DILOCO}",
    f"DiLoCo 0.6={DILOCO}@--outer.options '{{ momentum = 0.6, nesterov = true }}'",
    "LocalSGD=local-sgd",
]
COMMON = ["--run.tokens", "600000", "--inner.lr", "2e-3", "--seeds", "3", "--link", "100mbit,20ms"]
FOLDER = ["--run.folder", "runs/reproduce/figure-1"]

if __name__ == "__main__":
    sys.exit(main(["compare", *ARMS, *COMMON, *FOLDER, *sys.argv[1:]]))
