"""Whether a run ended better than it began."""

from adloco.rules.outcome import no_success

NAN = float("nan")


def said(*losses: float | None, trained: float | None = 2.0, evaluated: bool = False) -> str:
    memory = {"evaluation": {}} if evaluated else {}
    records = [{"val_loss": loss, "train_loss": trained, "memory": memory} for loss in losses]
    return no_success(records)


def test_a_loss_above_its_start_is_no_success() -> None:
    assert said(3.0, 2.0) == said(3.0, 2.0, None) == said(3.0, 3.0) == said(0.69311, 0.69312) == ""
    above = "ended at 3.100, above 3.000 in its first evaluation"
    assert said(3.0, 2.0, 3.1).startswith(f"The run did not learn: its validation loss {above}. ")
    assert said(NAN, 3.0, 2.0, 3.1) == said(3.0, 3.1)
    small = "its validation loss ended at 4.000e-05, above 2.000e-05 in its first evaluation"
    assert small in said(2e-5, 4e-5) and said(4e-5, 2e-5) == said(2.0001e-5, 2.0002e-5) == ""
    losses = [(3.0, 4.0), (3.1, 2.5)]
    records = [{"val_loss": val, "train_loss": train, "memory": {}} for val, train in losses]
    fell = f"The validation loss {above}, while that of training fell from 4.000 to 2.500"
    assert no_success(records).startswith(fell)
    # All steps of its first round were skipped, so that it trained on nothing.
    unknown = [records[0] | {"train_loss": None}, records[1]]
    assert no_success(unknown) == said(3.0, 3.1)


def test_losses_of_other_texts_are_not_compared() -> None:
    """After an island was dropped, the loss is that of the other one's text, which is harder."""
    islands = [{"island": "easy"}, {"island": "hard"}]
    both = {"val_loss": 4.0, "train_loss": 4.0, "islands": islands}
    alone = [{"val_loss": loss, "train_loss": 4.0, "islands": islands[1:]} for loss in (4.4, 4.2)]
    assert no_success([both, *alone]) == ""
    worse = [both, *alone, alone[0] | {"val_loss": 4.5}]
    assert "above 4.400" in no_success(worse)


def test_one_evaluation_says_nothing() -> None:
    assert no_success([]) == said(3.0) == said(None) == said(None, 3.0) == ""


def test_a_loss_that_is_not_finite_is_no_success() -> None:
    for last in (NAN, None):
        assert said(3.0, 2.0, trained=last).startswith("The run has diverged")
    assert said(3.0, NAN).startswith("The run has diverged")
    # A file has no NaN.
    assert said(3.0, None, evaluated=True).startswith("The run has diverged")
