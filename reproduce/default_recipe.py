"""The default recipe against AdLoCo with AdamW and fp32, `single`, `diloco` (two outer momenta) and
`local-sgd`, over three seeds.

    # 18 runs of two to three minutes on two cores
    .venv/bin/python reproduce/default_recipe.py runs/reproduce/default

Further words are those of `adloco compare`, whose page has the table and the curves.
"""

import sys
from pathlib import Path

from adloco.cli.main import main

DILOCO = Path(__file__).with_name("diloco.toml")
"""With AdamW and the published outer momentum of 0.9. Runs as short as these reach a lower loss
with 0.6, so it is run with both.
"""
ARMS = [
    "adloco",
    "adloco (AdamW, fp32)=adloco@--inner.optimizer adamw --inner.lr 2e-3 --outer.lr 0.7 "
    "--wire.format fp32 --run.tokens 1200000",
    "single",
    f"diloco (momentum 0.9)={DILOCO}",
    f"diloco (momentum 0.6)={DILOCO}@--outer.options '{{ momentum = 0.6, nesterov = true }}'",
    "local-sgd",
]

if __name__ == "__main__":
    words = sys.argv[1:]
    folder = words.pop(0) if words and not words[0].startswith("-") else "runs/reproduce/default"
    sys.exit(main(["compare", *ARMS, "--seeds", "3", "--run.folder", folder, *words]))
