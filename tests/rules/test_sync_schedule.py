"""When each fragment is sent and arrives, by hand."""

import itertools

import pytest

from adloco.rules.agreement import mean_cosine, relative_error
from adloco.rules.sync_schedule import Streaming, SyncEvent


def steps(streaming: Streaming, inner_steps: int) -> list[tuple[int, str, int]]:
    return [(event.step, event.kind, event.fragment) for event in streaming.events(inner_steps)]


@pytest.mark.parametrize(("fragments", "tau"), [(1, 0), (1, 3), (3, 0), (3, 2)])
def test_the_fewest_steps_are_those_that_a_cut_allows(fragments: int, tau: int) -> None:
    streaming = Streaming(fragments=fragments, tau=tau)
    assert len(streaming.cut([[0], [1], [2]], streaming.fewest_steps)) == fragments
    with pytest.raises(ValueError, match="must be >="):
        streaming.cut([[0], [1], [2]], streaming.fewest_steps - 1)


def test_one_fragment_is_the_plain_outer_step() -> None:
    assert steps(Streaming(), 20) == [(20, "sync", 0)]
    assert not Streaming().replicas_diverge
    assert not Streaming(tau=3, alpha=0.0).replicas_diverge
    assert Streaming(tau=3).replicas_diverge and Streaming(fragments=2).replicas_diverge
    assert Streaming(alpha=0.5).replicas_diverge


def test_what_workers_keep_unless_alpha_is_given() -> None:
    assert [Streaming().own_weight, Streaming(tau=1).own_weight] == [0.0, 0.5]
    assert [Streaming(tau=tau, alpha=1).own_weight for tau in (0, 1)] == [1, 1]
    assert [Streaming(alpha=own).mixes for own in (0.0, 0.5, 1.0)] == [False, True, False]


def test_without_overlap_a_fragment_is_synced_at_once() -> None:
    assert steps(Streaming(fragments=3), 7) == [(2, "sync", 0), (4, "sync", 1), (7, "sync", 2)]


def test_staggered_and_overlapped() -> None:
    # 100 steps in four: arrivals at 25, 50, 75, 100, each five steps after its leaving.
    expected = [
        (20, "send", 0),
        (25, "receive", 0),
        (45, "send", 1),
        (50, "receive", 1),
        (70, "send", 2),
        (75, "receive", 2),
    ]
    assert steps(Streaming(fragments=4, tau=5), 100) == [
        *expected,
        (95, "send", 3),
        (100, "receive", 3),
    ]


@pytest.mark.parametrize("inner_steps", [1, 2, 3, 7, 20, 30])
@pytest.mark.parametrize("fragments", [1, 2, 3, 5])
@pytest.mark.parametrize("tau", [1, 3])
def test_each_once_in_order_and_one_at_a_time(inner_steps: int, fragments: int, tau: int) -> None:
    """This holds also for rounds that the budget cuts short."""
    events = Streaming(fragments=fragments, tau=tau).events(inner_steps)
    assert (
        [event.fragment for event in events[::2]]
        == [event.fragment for event in events[1::2]]
        == list(range(fragments))
    )
    assert [event.kind for event in events] == ["send", "receive"] * fragments
    assert all(0 <= first.step <= second.step for first, second in itertools.pairwise(events))
    assert events[-1] == SyncEvent(step=inner_steps, kind="receive", fragment=fragments - 1)
    assert all(
        arrival.step - leaving.step <= tau
        for leaving, arrival in zip(events[::2], events[1::2], strict=True)
    )


def test_layers_are_dealt_out() -> None:
    layers = [[0], [1, 2], [3, 4], [5, 6], [7, 8], [9]]
    assert Streaming(fragments=2).cut(layers, 100) == [[0, 3, 4, 7, 8], [1, 2, 5, 6, 9]]
    assert Streaming(fragments=4).cut(layers, 100) == [[0, 7, 8], [1, 2, 9], [3, 4], [5, 6]]


def test_refusals() -> None:
    for wrong, message in [
        ({"fragments": 0}, "^fragments must be >= 1, got 0"),
        ({"tau": -1}, "^tau must be >= 0, got -1"),
        ({"alpha": 1.01}, r"^alpha must be in \[0, 1\] or auto, got 1.01"),
        ({"alpha": -0.5}, r"^alpha must be in \[0, 1\] or auto, got -0.5"),
    ]:
        with pytest.raises(ValueError, match=message):
            Streaming(**wrong)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match="^streaming.fragments must be <= 3, the layers of this model, got 4"
    ):
        Streaming(fragments=4).cut([[0], [1], [2]], 100)
    with pytest.raises(
        ValueError,
        match=r"^method.sync_every must be >= 22 with streaming.fragments = 2 .* got 20",
    ):
        Streaming(fragments=2, tau=10).cut([[0], [1], [2]], 20)
    with pytest.raises(
        ValueError, match="^method.sync_every must be >= 3 with streaming.fragments = 3 .*, got 2"
    ):
        Streaming(fragments=3).cut([[0], [1], [2]], 2)


def test_agreement_by_hand() -> None:
    # (3, 0) and (0, 4): orthogonal. (3, 0) and (6, 0): alike. (3, 0) and (-3, 0): opposite.
    assert mean_cosine([9, 16], 25) == 0
    assert mean_cosine([9, 36], 81) == 1
    assert mean_cosine([9, 9], 0) == -1
    # Three: (1, 0), (1, 0), (0, 1): cosines 1, 0, 0 with equal weights; |sum|^2 = 5.
    assert mean_cosine([1, 1, 1], 5) == pytest.approx(1 / 3)
    assert (
        mean_cosine([4], 4) is None
        and mean_cosine([0, 0], 0) is None
        and mean_cosine([4, 0], 4) is None
    )
    assert relative_error([1, 3], [16, 48]) == 0.25
    assert relative_error([0], [0]) is None
