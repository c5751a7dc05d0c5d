"""One way to refuse a bad value: a ValueError whose single sentence says what was wrong, what was given and what is allowed."""


def require(condition: bool, message: str) -> None:
    """Raise ValueError(message) unless the condition holds."""
    if not condition:
        raise ValueError(message)
