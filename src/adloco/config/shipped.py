"""The recipes inside the package."""

from importlib import resources
from pathlib import Path


def shipped_recipes() -> list[str]:
    """Names of the recipes inside the package."""
    return sorted(
        Path(entry.name).stem
        for entry in resources.files("adloco.recipes").iterdir()
        if entry.name.endswith(".toml")
    )


def shipped_text(name: str) -> str:
    """The TOML text of a shipped recipe."""
    return resources.files("adloco.recipes").joinpath(f"{name}.toml").read_text()


def purpose(name: str) -> str:
    """The purpose of a shipped recipe: the first line of its file, which is a comment."""
    return shipped_text(name).partition("\n")[0].removeprefix("# ")
