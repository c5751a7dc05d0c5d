"""Writing a file that is there whole or as it was before."""

from pathlib import Path


def write_text(file: Path, text: str) -> None:
    """Write a file atomically, in UTF-8 and with the line ends of the text."""
    temporary = file.with_name(f".{file.name}")
    temporary.write_bytes(text.encode())
    temporary.replace(file)
