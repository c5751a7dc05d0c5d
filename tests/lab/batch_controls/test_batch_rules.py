"""Rules that serve as controls for adaptive batches, by hand."""

import copy
import json
from pathlib import Path

import pytest

from adloco import AdLoCo
from adloco.lab.batch_controls.batch_rules import CyclicBatch, RandomBatch, ReplayBatch
from adloco.rules.batch_rules.batch_rule import BatchRule
from adloco.rules.controller import BatchController, BatchGuards
from tests.problems import at, make_run


def requests(rule: BatchRule, *samples: int) -> list[int]:
    return [rule.requested(None, at(seen)) for seen in samples]


def test_cycles() -> None:
    rule = CyclicBatch(cycle=[4, 8, 16], each_samples=100)
    assert requests(rule, 0, 99, 100, 200, 299, 300, 1000) == [4, 4, 8, 16, 16, 4, 8]


def test_random_batches_have_the_mean_and_repeat() -> None:
    rule = RandomBatch(lowest=4, highest=12)
    drawn = requests(rule, *range(4000))
    assert {*drawn} == {*range(4, 13)}
    # Evenly from 4 to 12: mean 8, deviation 2.58; of 4000 draws 0.041. Five of these.
    assert abs(sum(drawn) / len(drawn) - 8) < 5 * 0.041
    assert requests(RandomBatch(lowest=4, highest=12), *range(100)) == drawn[:100]
    other = [rule.requested(None, at(seen, seed=1)) for seen in range(100)]
    assert sum(one != two for one, two in zip(other, drawn, strict=False)) > 60


def test_a_replay_follows_the_requests_over_samples(tmp_path: Path) -> None:
    """Trainer 1 trained 10 steps of 8, then 5 of 12: it had seen 80 and 140 samples when it
    requested 16 and 32.
    """
    rows = [(10, 8, 8), (15, 16, 12), (25, 32, 32)]
    lines = [
        {
            "inner_steps": steps,
            "trainers": [
                {"trainer": 0, "requested_batch": 99, "trainer_batch": 99},
                {"trainer": 1, "requested_batch": requested, "trainer_batch": trained},
            ],
        }
        for steps, requested, trained in rows
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    rule = ReplayBatch(replayed_run=str(tmp_path), replayed_trainer=1)
    assert requests(rule, 0, 79, 80, 139, 140, 99999) == [8, 8, 16, 16, 32, 32]


def test_the_first_round_has_the_first_batch_of_a_control(tmp_path: Path) -> None:
    """batch.initial is 8; a growth of 2 limits later requests, not the first one."""
    line = {
        "inner_steps": 9,
        "trainers": [{"trainer": 0, "requested_batch": 5, "trainer_batch": 5}],
    }
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    firsts: list[tuple[BatchRule, int]] = [
        (CyclicBatch(cycle=[40, 8], each_samples=100), 40),
        (ReplayBatch(replayed_run=str(tmp_path)), 5),
        (RandomBatch(lowest=30, highest=30), 30),
    ]
    guards = BatchGuards(initial=8, minimum=2, maximum=50, max_growth=2, grow_only=True)
    assert [BatchController(rule, guards).requested_batch for rule, _ in firsts] == [
        first for _, first in firsts
    ]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CyclicBatch(cycle=[], each_samples=1), "^cycle must hold batches > 0, and at"),
        (lambda: CyclicBatch(cycle=[4], each_samples=0), "^each_samples must be > 0, got 0"),
        (lambda: RandomBatch(lowest=9, highest=4), "^lowest must be > 0 and <= highest = 4, got 9"),
        (
            lambda: ReplayBatch(replayed_run="/none"),
            "^replayed_run must be a run folder with requests of replayed_trainer = 0",
        ),
    ],
)
def test_bad_settings(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=message):
        make()


def test_random_batches_follow_the_seed_of_the_run() -> None:
    def fresh(seed: int) -> AdLoCo:
        return make_run(seed=seed, batch=RandomBatch(lowest=2, highest=20))

    def requests(run: AdLoCo, rounds: int) -> list[int]:
        return [report.trainers[0].requested_batch for report in run.rounds(rounds)]

    drawn = requests(fresh(0), 8)
    assert requests(fresh(1), 8) != drawn
    begun, resumed = fresh(0), fresh(0)
    first = requests(begun, 3)
    resumed.load_state_dict(copy.deepcopy(begun.state_dict()))
    assert first + requests(resumed, 5) == drawn
