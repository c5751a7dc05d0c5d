"""`adloco export`: writes a run's model as a folder that transformers loads."""

from argparse import Namespace
from pathlib import Path

from adloco.cli.arguments import Commands, add_best, add_command, add_trained_run
from adloco.cli.terminal import open_console


def add_parser(commands: Commands) -> None:
    parser = add_command(
        commands,
        "export",
        run,
        summary="write a run's model for transformers",
        description="Write a run's model as a folder that transformers loads: weights,\n"
        "configuration, tokenizer and model card.",
    )
    add_trained_run(parser, purpose="export")
    add_best(parser)
    parser.add_argument(
        "--to",
        type=Path,
        required=True,
        metavar="FOLDER",
        help="folder to write; it must not exist yet",
    )
    parser.add_argument(
        "--license",
        default="unknown",
        metavar="ID",
        help="licence for the model card, as in apache-2.0 (default: unknown)",
    )
    parser.add_argument(
        "--language",
        default="",
        metavar="CODE,...",
        help="languages for the model card, as in en,de (default: none stated)",
    )
    parser.add_argument(
        "--labels",
        default="",
        metavar="NAME,...",
        help="names of a classifier's classes 0, 1, ... (default: LABEL_0, LABEL_1, ...)",
    )


def run(arguments: Namespace) -> int:
    from adloco.run.trained import load_trained
    from adloco.run.transformers_export import export

    folder: Path = arguments.to
    console = open_console()
    with console.status("writing the model ..."):
        export(
            load_trained(arguments.run_folder, arguments.trainer, arguments.best),
            folder,
            license_id=arguments.license,
            languages=_names(arguments.language),
            labels=_names(arguments.labels),
        )
    console.print(f"{folder}: load it with from_pretrained({str(folder)!r})", soft_wrap=True)
    return 0


def _names(text: str) -> list[str]:
    """The words of a text such as en,de."""
    return [word.strip() for word in text.split(",")] if text else []
