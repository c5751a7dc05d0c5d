"""What an opened recipe says of its training problem."""

from pathlib import Path
from typing import Any

import pytest

from adloco import OneProcess
from adloco.config.recipe import build_recipe, override, read_values
from adloco.run.start import open_recipe, open_task

SMALL = "hidden_size = 32, num_hidden_layers = 1, num_attention_heads = 2, intermediate_size = 64"
DYNAMIC = 'rope_parameters = { rope_type = "dynamic", factor = 2.0, rope_theta = 10000.0 }'
OF_LIBRARY = [("model.source", "transformers"), ("model.pretrained", "false")]


@pytest.mark.parametrize(
    ("settings", "replayable"),
    [
        ([], True),
        ([("model.gradient_checkpointing", "true")], False),
        ([*OF_LIBRARY, ("model.name", "llama"), ("model.overrides", f"{{ {SMALL} }}")], True),
        (
            [
                *OF_LIBRARY,
                ("model.name", "llama"),
                ("model.overrides", f"{{ {SMALL}, {DYNAMIC} }}"),
            ],
            False,
        ),
        ([*OF_LIBRARY, ("model.name", "qwen3"), ("model.overrides", f"{{ {SMALL} }}")], True),
        ([*OF_LIBRARY, ("model.name", "mistral"), ("model.overrides", f"{{ {SMALL} }}")], False),
    ],
)
def test_the_passes_of_which_models_can_be_captured(
    settings: list[tuple[str, str]], replayable: bool
) -> None:
    recipe = build_recipe(override(read_values("single"), settings))
    opened = open_recipe(recipe)
    problem = opened.problem(opened.train_source())
    assert problem.replayable == replayable
    assert problem.compiled_loss_fn is not None
    assert problem.tokens_per_sample == recipe.data.context_tokens


def test_ranks_with_another_tokenizer_are_refused(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text is the same, and so may be its name and the number of its ids."""
    data = [("data.path", str(corpus)), ("data.cache", str(tmp_path))]
    recipe, placement = build_recipe(override(read_values("single"), data)), OneProcess()
    own = open_task(recipe, None, placement).tokenizer.fingerprint()

    def of_rank_zero(value: Any) -> Any:
        return "another one" if value == own else value

    monkeypatch.setattr(placement, "agree", of_rank_zero)
    with pytest.raises(ValueError, match="data.tokenizer 'bytes' differs between ranks"):
        open_task(recipe, None, placement)
