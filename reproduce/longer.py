"""Does a longer run change what figure 1 says? AdLoCo and DiLoCo with the published momentum, on
twice the tokens.

.venv/bin/python reproduce/longer.py
    # 6 runs, three seeds of each arm

Arms and settings are those of `figure_1.py`. Further words are those of `adloco compare`.
"""

import sys

from figure_1 import ARMS, COMMON

from adloco.cli.main import main

LONGER = ["--run.tokens", "1200000", "--run.folder", "runs/reproduce/longer"]

if __name__ == "__main__":
    sys.exit(main(["compare", *ARMS[:2], *COMMON, *LONGER, *sys.argv[1:]]))
