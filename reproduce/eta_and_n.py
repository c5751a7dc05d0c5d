"""What eta (the norm test's tolerance) and n (switch mode's multiplier) do to AdLoCo.

.venv/bin/python reproduce/eta_and_n.py
    # 27 runs, three seeds of nine points

The recipe adloco.toml beside this file with AdamW; 4 samples fit, so n decides whether requests
from 5 to 12 are cut to 4 or accumulated. Further words are those of `adloco sweep`.
"""

import sys
from pathlib import Path

from adloco.cli.main import main

RECIPE = str(Path(__file__).with_name("adloco.toml"))
SETTINGS = ["--inner.optimizer", "adamw", "--inner.lr", "2e-3", "--wire.format", "fp32"]
AXES = ["--batch.eta", "0.5", "1", "2", "--switch.multiplier", "1.5", "2", "3"]
COMMON = ["--run.tokens", "300000", "--seeds", "3", "--run.folder", "runs/reproduce/eta-and-n"]

if __name__ == "__main__":
    sys.exit(main(["sweep", RECIPE, *AXES, *SETTINGS, *COMMON, *sys.argv[1:]]))
