"""The table of what a process can be, what is seen of it, and what is done."""

from pathlib import Path

import pytest

import adloco.elastic
from adloco.elastic.membership import TABLE, Action, Change, Seen, State, seen_by_launcher

README = Path(adloco.elastic.__file__).with_name("README.md")


def lines() -> list[str]:
    """The table in Markdown: states of which the same is seen, and for which the same is done,
    stand in one line.
    """
    rows: dict[tuple[Seen, Change], list[str]] = {}
    for (state, seen), change in TABLE.items():
        rows.setdefault((seen, change), []).append(state.name.lower())
    return [
        f"| {', '.join(states)} | {seen.value} | {change.state.name.lower()} "
        f"| {change.action.value} |"
        for (seen, change), states in rows.items()
    ]


def test_the_readme_shows_the_table_and_says_what_each_state_is() -> None:
    page = README.read_text().splitlines()
    begins = page.index("|---|---|---|---|") + 1
    ends = page.index("", begins)
    assert page[begins:ends] == lines()
    for state in State:
        assert f"- **{state.name.lower()}**: {state.value}." in page


def test_everything_that_can_be_seen_or_done_is_in_the_table() -> None:
    assert {seen for _, seen in TABLE} == {*Seen}
    assert {change.action for change in TABLE.values()} == {*Action}
    assert {change.state for change in TABLE.values()} == {*State}
    assert {state for state, _ in TABLE} == {*State} - {State.GONE}, "what is gone stays so"


@pytest.mark.parametrize("state", [State.TRAINING, State.SILENT, State.JOINING])
@pytest.mark.parametrize("code", [0, 1, 2, 3, 130, -9, -15])
def test_every_end_of_a_process_leaves_it_gone(state: State, code: int) -> None:
    change = TABLE[state, seen_by_launcher(code)]
    assert change.state is State.GONE
    assert (change.action is Action.END) == (code == 0)
    if code in (2, 3):
        assert change.action is Action.END_ALL, "an error that would come again"
    if code in (-9, -15, 130):
        assert change.action is Action.REPLACE


def test_every_process_can_train_again_or_end() -> None:
    """A silent one ends; all others can come to train, those that train after a failure."""
    leads = {state: {TABLE[key].state for key in TABLE if key[0] is state} for state in State}
    for state in {*State} - {State.GONE}:
        reached, before = set(leads[state]), set[State]()
        while reached != before:
            before = set(reached)
            reached |= {later for one in before for later in leads[one]}
        end = State.GONE if state is State.SILENT else State.TRAINING
        assert end in reached, f"what is {state.name.lower()} stays so"
