"""All texts of a source, as a token store asks for them."""

from dataclasses import dataclass, field

from adloco.data.data_settings import DataSettings
from adloco.data.feeds import chunks_after
from adloco.data.token_store import State


@dataclass
class Read:
    train: list[str] = field(default_factory=list)
    validation: list[str] = field(default_factory=list)
    skipped: dict[str, int] = field(default_factory=dict)


def read_all(data: DataSettings) -> Read:
    read = Read()
    for chunk in chunks_after(data, State(source="", dtype="uint16")):
        read.train += chunk.texts["train"]
        read.validation += chunk.texts["validation"]
        read.skipped = chunk.after["skipped"]
    return read
