"""`adloco`, which is also `python -m adloco`."""

import sys


def main() -> int:
    """Run the command line and return its exit code.

    Ctrl+C while its modules are imported ends it as quietly as any later one.
    """
    try:
        from adloco.cli.main import main as run

        return run()
    except KeyboardInterrupt:
        sys.stderr.write("adloco: interrupted\n")
        return 130


if __name__ == "__main__":
    sys.exit(main())
