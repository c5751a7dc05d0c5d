"""DDP-Norm (arXiv 2412.21124): its tolerance eta, the interval between tests, and the largest
batch, each changed alone, beside data-parallel training with a constant batch.

.venv/bin/python reproduce/ddp_norm.py
    # 24 runs, three seeds of each arm

Further words are those of `adloco compare`.
"""

import sys

from adloco.cli.main import main

ARMS = [
    "eta 1.5, every 10, cap 64=ddp-norm",
    "eta 0.8=ddp-norm@--batch.eta 0.8",
    "eta 3=ddp-norm@--batch.eta 3",
    "every 5=ddp-norm@--method.sync_every 5 --evaluation.every 4",
    "every 40=ddp-norm@--method.sync_every 40 --evaluation.every 1",
    "cap 16=ddp-norm@--batch.maximum 16",
    "cap 512=ddp-norm@--batch.maximum 512",
    "constant 8=ddp",
]
COMMON = ["--run.tokens", "300000", "--inner.lr", "2e-3", "--seeds", "3"]
FOLDER = ["--run.folder", "runs/reproduce/ddp-norm"]

if __name__ == "__main__":
    sys.exit(main(["compare", *ARMS, *COMMON, *FOLDER, *sys.argv[1:]]))
