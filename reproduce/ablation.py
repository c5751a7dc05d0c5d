"""Figure 2 of arXiv 2508.18182: AdLoCo without adaptive batches, without merging, without switch
mode, and without all three.

.venv/bin/python reproduce/ablation.py
    # 15 runs, three seeds of each arm

What the recipe is without each is defined in docs/studies.md. Further words are those of `adloco
ablate`.
"""

import sys

from adloco.cli.main import main

COMMON = ["--run.tokens", "600000", "--seeds", "3", "--run.folder", "runs/reproduce/ablation"]

if __name__ == "__main__":
    sys.exit(main(["ablate", "adloco", *COMMON, *sys.argv[1:]]))
