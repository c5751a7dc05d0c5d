"""`adloco export`: writes a run's model as a folder that transformers loads."""

from dataclasses import dataclass
from pathlib import Path

from adloco.cli.arguments import ModelCommand, argument
from adloco.cli.terminal import open_console


@dataclass(kw_only=True)
class Export(ModelCommand):
    """Write a run's model as a folder that transformers loads: weights, configuration, tokenizer
    and model card.
    """

    key = "export"
    summary = "write a run's model for transformers"
    to: Path = argument(metavar="FOLDER")
    """Folder to write; it must not exist yet."""
    license: str = argument("unknown", "ID")
    """Licence for the model card, as in apache-2.0 (default: unknown)."""
    language: list[str] = argument([], "CODE,...")
    """Languages for the model card, as in en,de (default: none stated)."""
    labels: list[str] = argument([], "NAME,...")
    """Names of a classifier's classes 0, 1, ... (default: those of model.name if it has as many
    classes, else LABEL_0, LABEL_1, ...).
    """

    def run(self) -> int:
        console = open_console()
        with console.status("writing the model ..."):
            trained = self.load()
            from adloco.run.transformers_export import export  # It imports torch.

            notice = export(
                trained,
                self.to,
                license_id=self.license,
                languages=self.language,
                labels=self.labels,
            )
        console.print(f"{self.to}: load it with from_pretrained({str(self.to)!r})", soft_wrap=True)
        if notice:
            console.print(notice, soft_wrap=True)
        return 0
