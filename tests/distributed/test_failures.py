"""What ranks tell each other of failures, and how they tell a lost rank from a slow one."""

import threading

import torch.distributed as dist

from adloco.distributed.launch.failures import read_error, readable
from adloco.distributed.launch.heartbeats import (
    BEATS,
    Heartbeats,
    Silence,
    known_silent,
    silent_ranks,
    watch_progress,
)
from adloco.errors import LostRankError, OtherRankError


def test_a_message_of_another_rank_is_one_short_line_without_escapes() -> None:
    """ESC begins commands to a terminal; U+009B does so too, and U+202E reverses what follows."""
    assert readable("rank 1: \x1b[31mred\x1b[0m\r\n") == "rank 1:  [31mred [0m  "
    assert readable("a\x9bb\u202ec\x00d \u00e9") == "a b c d \u00e9"
    assert readable("x" * 5000) == "x" * 1000 + " ..."


def test_whatever_is_written_as_a_failure_is_read() -> None:
    error = read_error(b'{"lost": true, "message": "rank 1\\u001b[2J"}')
    assert type(error) is LostRankError
    assert str(error) == "rank 1 [2J"
    for written in (b"no JSON \x1b\xff", b'{"lost": 1}', b"[]", b"[" * 100_000, b'{"lost": []}'):
        assert type(read_error(written)) is OtherRankError
        assert str(read_error(written)).isprintable()


def test_a_counter_that_stays_is_silent_and_one_that_goes_on_is_not() -> None:
    silence = Silence()
    looks = [silence.look({"1": 5, "2": count}) for count in range(BEATS + 1)]
    assert looks == [[]] * BEATS + [["1"]]
    # It counted once before the last look.
    silence = Silence()
    assert [silence.look({"1": count}) for count in [7] * BEATS + [8] * BEATS] == [[]] * 2 * BEATS
    assert silence.look({"1": 8}) == ["1"]


def test_a_rank_without_heartbeats_is_named_with_its_machine() -> None:
    """Rank 1 counts once; rank 2 goes on; rank 0 looks."""
    store = dist.HashStore()
    hearts = [Heartbeats(store, rank, 3, timeout_seconds=40.0) for rank in range(3)]
    store.set("host-1", "node7\x1b")
    hearts[1].beat()
    errors = []
    for _ in range(BEATS + 1):
        hearts[2].beat()
        errors.append(hearts[0].beat())
    assert errors[:-1] == [None] * BEATS
    assert isinstance(errors[-1], LostRankError)
    assert "rank 1 on node7" in str(errors[-1])
    assert "timeout_seconds = 40 s" in str(errors[-1])
    assert [known_silent(store, rank) for rank in range(3)] == [False, True, False]
    hearts[1].count_up()
    assert not known_silent(store, 1), "it gives signs of life again"


def test_a_store_that_does_not_answer_is_noticed() -> None:
    """The counter goes on for three looks and then stays."""
    counts = iter([1, 2, 3, *[4] * 10])
    silent = threading.Event()
    watch_progress(lambda: next(counts), threading.Event(), 0.04, silent.set)
    assert silent.is_set()
    assert len(list(counts)) == 10 - 1 - BEATS
    over = threading.Event()
    over.set()
    watch_progress(lambda: 1, over, 0.04, lambda: (_ for _ in ()).throw(AssertionError))


def test_ranks_that_are_gone_are_named_with_their_machines() -> None:
    """Ranks 1 and 3 have ended; rank 2 lives; rank 4 never came so far as to give a sign."""
    store = dist.HashStore()
    hearts = [Heartbeats(store, rank, 5, timeout_seconds=40.0) for rank in range(5)]
    for rank, heart in enumerate(hearts[:4]):
        store.set(f"host-{rank}", f"node{rank}")
        heart.count_up()
    assert silent_ranks(store, 0, 5, hearts[2].count_up) == ["rank 1 on node1", "rank 3 on node3"]
