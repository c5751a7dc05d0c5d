"""What an opened recipe says of its training problem."""

import pytest

from adloco.config.recipe import build_recipe, override, read_values
from adloco.run.start import open_recipe

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
        ([*OF_LIBRARY, ("model.name", "qwen3"), ("model.overrides", f"{{ {SMALL} }}")], False),
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
