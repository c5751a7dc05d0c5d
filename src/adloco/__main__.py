"""`adloco`, which is also `python -m adloco`."""

import os
import sys


def main() -> int:
    """Run the command line and return its exit code.

    Ctrl+C while its modules are imported ends it as quietly as any later one.
    """
    try:
        from adloco.cli.main import main as run

        code = run()
    except KeyboardInterrupt:
        sys.stderr.write("adloco: interrupted\n")
        return 130
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # Threads of torch's process groups may still hold objects of Python: at its orderly end one
        # of several runs would be aborted ("terminate called without an active exception").
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
