"""Figure 2 of arXiv 2508.18182: AdLoCo without adaptive batches, without merging, without switch
mode, and without all three.

.venv/bin/python reproduce/ablation.py
    # 15 runs, three seeds of each arm

The recipe adloco.toml beside this file with the published eta of 0.8 and AdamW, so that requests
grow far above the 4 samples that fit. What the recipe is without each mechanism is defined in
docs/studies.md. Further words are those of `adloco ablate`.
"""

import sys
from pathlib import Path

from adloco.cli.main import main

RECIPE = str(Path(__file__).with_name("adloco.toml"))
SETTINGS = ["--batch.eta", "0.8", "--inner.optimizer", "adamw", "--inner.lr", "2e-3"]
COMMON = ["--run.tokens", "600000", "--seeds", "3", "--run.folder", "runs/reproduce/ablation"]

if __name__ == "__main__":
    sys.exit(main(["ablate", RECIPE, *SETTINGS, *COMMON, *sys.argv[1:]]))
