"""Parts of bench.py that need ranks: what an outer sync and a data-parallel step cost."""

from collections.abc import Iterator

from bench_loop import WIDTHS
from bench_pairs import Row, chosen
from sync import step_times, sync_times

from adloco.distributed.testing import run_on_ranks

RANKS = 2


def outer_sync(*, quick: bool) -> Iterator[Row]:
    """An outer sync against all_reduce of as many bytes, and against the same steps by hand."""
    for millions, turns in chosen([(1, 60), (10, 20), (30, 10)], quick):
        seconds = run_on_ranks(sync_times, RANKS, millions * 10**6, turns, timeout_seconds=600)[0]
        for name, text in (
            ("all_reduce", "a bare `all_reduce`"),
            ("by_hand", "the same outer step in plain torch"),
        ):
            yield Row.of(
                f"outer sync (Nesterov), {millions}M parameters, {RANKS} ranks",
                text,
                seconds["sync"],
                seconds[name],
                goal=1.15 if millions > 1 else None,
            )


def ddp(*, quick: bool) -> Iterator[Row]:
    """Rounds of `ddp` against as many steps of torch's DistributedDataParallel."""
    for millions, turns in chosen([(1, 12), (10, 4)], quick):
        seconds, parameters = run_on_ranks(
            step_times, RANKS, WIDTHS[millions], turns, timeout_seconds=600
        )[0]
        yield Row.of(
            f"`ddp`, {parameters / 1e6:.1f}M parameters, {RANKS} ranks",
            "a loop by hand with DistributedDataParallel",
            seconds["ours"],
            seconds["torch"],
            goal=1.03,
        )
