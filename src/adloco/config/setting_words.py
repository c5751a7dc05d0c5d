"""The settings of a recipe among the words of a line."""

from collections.abc import Sequence

from adloco.errors import require

TRUTHS = {"true", "false", "yes", "no", "on", "off", "1", "0"}
SOURCES = ("data.path", "data.dataset", "data.factory")


def take_settings(
    words: Sequence[str], *, lists: bool = False
) -> tuple[list[tuple[str, str]], list[str]]:
    """Separate settings from the other words of a line.

    lists: True if a key takes all values up to the next word that begins with --.

    Returns:
        (section.key, value) of every --section.key VALUE or --section.key=VALUE, and the other
        words. A setting that is true or false needs no value to be true. A list gives a pair for
        each value, and replaces one before it.

    Raises:
        ValueError: A setting has no value.
    """
    settings: list[tuple[str, str]] = []
    others, left = [], list(words)
    while left:
        word = left.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or "." not in name:
            others.append(word)
            continue
        if not equals and _is_bare_switch(name, left):
            settings.append((name, "true"))
            continue
        if not equals and (not left or left[0].startswith("--")):
            raise ValueError(f"{word} needs a value, as in {word} VALUE")
        # A list that is given again replaces the first.
        settings = [pair for pair in settings if not lists or pair[0] != name]
        settings.append((name, value if equals else left.pop(0)))
        while lists and left and not left[0].startswith("--"):
            settings.append((name, left.pop(0)))
    return settings, others


def check_text_named(settings: Sequence[tuple[str, str]]) -> None:
    """Raise ValueError if settings name the text, and every one that does is empty."""
    sources = {name for name, _ in settings if name in SOURCES}
    empty = sorted({name for name, text in settings if name in sources and not text})
    require(
        not empty or len(empty) < len(sources),
        f"--{' and --'.join(empty)} '' names no text; name one, or leave it out to train on that "
        "of the recipe, which is Python's standard library where it names none",
    )


def _is_bare_switch(name: str, left: Sequence[str]) -> bool:
    """True if a setting that is true or false has no value before the words that are left."""
    if left and left[0].lower() in {*TRUTHS, "auto"}:
        return False
    from adloco.config.finding import switches

    return name in switches()
