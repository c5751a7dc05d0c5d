"""What ranks tell each other of failures."""

from adloco.distributed.launch.failures import readable


def test_a_message_of_another_rank_is_one_short_line_without_escapes() -> None:
    """ESC begins commands to a terminal; U+009B does so too, and U+202E reverses what follows."""
    assert readable(b"rank 1: \x1b[31mred\x1b[0m\r\n\xff") == "rank 1:  [31mred [0m  \ufffd"
    assert readable("a\x9bb\u202ec\x00d \u00e9") == "a b c d \u00e9"
    assert readable("x" * 5000) == "x" * 1000 + " ..."
