"""A plan has one model, which is that of the short runs."""

from pathlib import Path

import pytest

from adloco.cli.main import main
from adloco.config.recipe import build_recipe, override, read_values
from adloco.config.sections import Recipe
from adloco.plan.short_runs import check_shared_model


def recipe(name: str, *settings: tuple[str, str]) -> Recipe:
    return build_recipe(override(read_values(name), list(settings)))


def test_candidates_and_runs_share_the_model() -> None:
    planned, longer = recipe("ddp"), recipe("diloco", ("data.context_tokens", "512"))
    check_shared_model([planned, recipe("diloco")], recipe("local-sgd"))
    with pytest.raises(ValueError, match="must share data.context_tokens"):
        check_shared_model([planned, longer], None)
    with pytest.raises(ValueError, match="differ in data.context_tokens"):
        check_shared_model([planned], longer)


@pytest.mark.parametrize("flag", ["--parameters=-5", "--parameters=inf", "--noise-scale=nan"])
def test_sizes_are_numbers(flag: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["plan", "--cluster", str(tmp_path / "c.toml"), flag]) == 2
    assert "must be a number" in capsys.readouterr().err
