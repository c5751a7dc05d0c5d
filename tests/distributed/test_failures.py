"""What ranks tell each other of failures."""

from adloco.distributed.launch.failures import read_error, readable
from adloco.errors import OtherRankError, RankFailureError


def test_a_message_of_another_rank_is_one_short_line_without_escapes() -> None:
    """ESC begins commands to a terminal; U+009B does so too, and U+202E reverses what follows."""
    assert readable("rank 1: \x1b[31mred\x1b[0m\r\n") == "rank 1:  [31mred [0m  "
    assert readable("a\x9bb\u202ec\x00d \u00e9") == "a b c d \u00e9"
    assert readable("x" * 5000) == "x" * 1000 + " ..."


def test_whatever_is_written_as_a_failure_is_read() -> None:
    error = read_error(b"rank-failure rank 1\x1b[2J")
    assert type(error) is RankFailureError
    assert str(error) == "rank 1 [2J"
    for written in (b"error \x1b\xff", b"", b"rank-failures many", b"[" * 100_000):
        assert type(read_error(written)) is OtherRankError
        assert str(read_error(written)).isprintable()
