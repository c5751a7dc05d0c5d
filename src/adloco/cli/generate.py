"""`adloco generate`: continues a text with a run's model."""

from argparse import Namespace

from adloco.cli.arguments import Commands, add_best, add_command, add_trained_run
from adloco.cli.terminal import printable


def add_parser(commands: Commands) -> None:
    parser = add_command(
        commands,
        "generate",
        run,
        summary="continue a text with a run's model",
        description="Continue a text with a run's model.",
    )
    add_trained_run(parser, purpose="use")
    add_best(parser)
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="text to continue")
    parser.add_argument(
        "--tokens",
        type=int,
        default=200,
        metavar="N",
        help="most tokens to add (default: %(default)s)",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        metavar="T",
        help="0 takes the most likely token each time (default: %(default)s)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of the draw (default: %(default)s)"
    )


def run(arguments: Namespace) -> int:
    from adloco.run.trained import continued, load_trained

    pieces = continued(
        load_trained(arguments.run_folder, arguments.trainer, arguments.best),
        arguments.prompt,
        max_tokens=arguments.tokens,
        temperature=arguments.temperature,
        seed=arguments.seed,
    )
    for piece in pieces:
        print(printable(piece), end="", flush=True)
    print()
    return 0
