"""The name of a new run's folder."""

import re

import pytest

from adloco.config.recipe import build_recipe, override, read_values
from adloco.run.folder import new_folder

TIME = r"-\d{8}-\d{6}-\d{6}"


def folder(*settings: tuple[str, str]) -> str:
    return str(new_folder(build_recipe(override(read_values("diloco"), settings))))


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ([], "diloco-nano-stdlib"),
        ([("data.dataset", "allenai/c4"), ("model.shape", "tinyllama")], "diloco-tinyllama-c4"),
        ([("data.path", "/some where/Größe 7.v2.txt")], "diloco-nano-Gr-e-7.v2.txt"),
        ([("data.path", "/texts/")], "diloco-nano-texts"),
        ([("data.path", "/texts/.")], "diloco-nano-texts"),
        ([("data.factory", "mypackage.data:rows")], "diloco-nano-rows"),
        ([("run.name", f"a/b:c* {'long' * 99}")], f"c-{('long' * 6)[:22]}-nano-stdlib"),
        ([("run.name", "..")], "nano-stdlib"),
    ],
)
def test_a_folder_is_named_after_recipe_model_data_and_time(
    settings: list[tuple[str, str]], name: str
) -> None:
    assert re.fullmatch(f"runs/{re.escape(name)}{TIME}", folder(*settings))


def test_the_name_of_a_model_of_transformers_is_short() -> None:
    values = override(
        read_values("adloco-imdb"), [("model.name", "/models/my bert/"), ("run.name", "imdb")]
    )
    name = str(new_folder(build_recipe(values)))
    assert re.fullmatch(f"runs/imdb-my-bert-imdb{TIME}", name)


def test_a_chosen_folder_is_left_as_it_is() -> None:
    assert folder(("run.folder", "runs/Größe")) == "runs/Größe"


def test_runs_that_start_together_have_folders_of_their_own_which_sort_by_time() -> None:
    names = [folder() for _ in range(3)]
    assert len(set(names)) == 3
    assert names == sorted(names)
