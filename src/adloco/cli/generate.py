"""`adloco generate`: continues a text with a run's model."""

import math
from argparse import Namespace

from adloco.cli.arguments import Commands, add_command, add_trained_run
from adloco.cli.terminal import printable
from adloco.errors import require

COLDEST = 1e-6
"""Smallest temperature but 0; float32 has none for a difference of logits over a smaller one."""


def add_parser(commands: Commands) -> None:
    parser = add_command(
        commands,
        "generate",
        run,
        summary="continue a text with a run's model",
        description="Continue a text with a run's model.",
    )
    add_trained_run(parser, purpose="use")
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
    from adloco.run.trained import load_trained
    from adloco.tasks.language_model import generate

    most, temperature, asked = arguments.tokens, arguments.temperature, arguments.prompt
    require(
        most > 0 and (temperature == 0 or COLDEST <= temperature < math.inf),
        f"--tokens must be > 0 and --temperature 0 or >= {COLDEST} and finite, got {most} and "
        f"{temperature}",
    )
    require(
        -(2**63) <= arguments.seed < 2**63,
        f"--seed must be >= -2^63 and < 2^63, got {arguments.seed}",
    )
    trained = load_trained(arguments.run_folder, arguments.trainer)
    recipe, tokenizer = trained.stored.recipe, trained.stored.tokenizer
    require(
        recipe.task.generates,
        "adloco generate needs a language model, and the run in "
        f"{arguments.run_folder} trains another task; use adloco evaluate",
    )
    prompt = tokenizer.encode([asked])[0] or [tokenizer.end_of_text]
    shown = tokenizer.decode(prompt) if asked else ""
    print(printable(shown), end="", flush=True)
    ids = list(prompt)
    for token in generate(
        trained.model,
        prompt,
        max_tokens=most,
        temperature=temperature,
        context_tokens=recipe.data.context_tokens,
        stop=tokenizer.end_of_text,
        seed=arguments.seed,
    ):
        ids.append(token)
        text = tokenizer.decode(ids if asked else ids[1:])
        # A character of several tokens is shown once it is complete.
        if text.startswith(shown) and not text.endswith("\ufffd"):
            print(printable(text[len(shown) :]), end="", flush=True)
            shown = text
    print()
    return 0
