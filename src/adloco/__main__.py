"""`python -m adloco` is `adloco`."""

import sys

from adloco.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
