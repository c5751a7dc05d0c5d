"""`adloco convert`: recipes from the AdLoCo authors' configuration, and what it says of keys."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from adloco.cli.main import main
from adloco.config.recipe import build_recipe, read_values
from adloco.config.recipe_text import named_settings
from adloco.lab.authors.conversion import convert
from adloco.lab.authors.keys import COMPUTED, ONLY_WITH, first_rows, read_rows

SHIPPED: dict[str, Any] = {
    "CUDA_VISIBLE_DEVICES": "3",
    "training_seed": 42,
    "dataset": "c4",
    "data_sample_size": 2048,
    "val_size": 100,
    "samples_per_class": 500,
    "c4_language": "en",
    "c4_streaming": True,
    "c4_tokenized_path": "/data/c4_tokenized",
    "model_type": "microllama",
    "model_config": {"name": "keeeeenw/MicroLlama", "pretrained=True": None},
    "num_outer_steps": 20,
    "lr_inner": "2e-5",
    "lr_outer": "0.5",
    "lr_sgd": "2e-5",
    "nodes_per_gpu": 4,
    "num_init_trainers": 4,
    "num_inner_steps": 200,
    "save_weights_every": 4,
    "initial_batch_size": 1,
    "distributed_algo": "DiLoCo",
    "padding_percentage": 0.9,
    "single_seed": True,
    "need_to_reinit_output_layers": True,
    "merging_policy": "worst_with_worst",
    "merge_frequency": 2,
    "sampling_method": "augmented_inner_product_test",
    "switch_mode": "threshold_switch_mode",
    "ETA": 0.8,
    "vartheta": 0.01,
    "nu": 0.3,
    "log_dir": "logs",
    "log_file": "training_log.log",
    "task_name": "AdLoCo",
}
"""The values of the configuration in the last commit of the authors' repository."""
IMDB = {
    "dataset": "imdb",
    "model_type": "bert",
    "model_config": {"name": "google-bert/bert-base-uncased", "num_labels": 2, "pretrained": True},
    "val_size": 500,
    "sampling_method": "norm_test",
}
README = {
    "CUDA_VISIBLE_DEVICES": "1,3",
    "devices": ["cuda:1"],
    "real_device_ids": ["4"],
    "number_of_training_epochs": 2,
    "learning_rate_for_inner_opt": 1e-5,
    "learning_rate_for_outer_opt": 1e-4,
    "nodes_per_gpu": 4,
    "number_of_initial_trainers": 4,
    "number_of_inner_steps_between_outers": 5,
    "INITIAL_BATCH_SIZE": 3,
    "ETA": 0.1,
    "sampling_method": "norm_test",
    "distributed_algo": "LocalSGD",
}
"""Older names, as their README shows them."""


def written(tmp_path: Path, values: dict[str, Any] | str) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(values if isinstance(values, str) else yaml.safe_dump(values, sort_keys=False))
    return path


def settings(path: Path) -> dict[str, Any]:
    """All settings of the recipe that the command writes."""
    target = path.with_name("recipe.toml")
    assert main(["convert", str(path), "--to", str(target)]) == 0
    return named_settings(build_recipe(read_values(str(target))))


def differences(settings: dict[str, Any], recipe: str) -> dict[str, tuple[Any, Any]]:
    """Where settings and a shipped recipe differ; None: the one has no such setting."""
    shipped = named_settings(build_recipe(read_values(recipe)))
    return {
        name: (settings.get(name), shipped.get(name))
        for name in settings | shipped
        if settings.get(name) != shipped.get(name)
    }


def test_the_shipped_configuration_is_adloco_paper(tmp_path: Path) -> None:
    """But for what the page says: its rule, and its budget in rounds."""
    assert differences(settings(written(tmp_path, SHIPPED)), "adloco-paper") == {
        "run.name": ("AdLoCo", "adloco-paper"),
        "run.rounds": (20, 0),
        "run.inner_steps": (0, 2400),
        "batch.rule": ("augmented", "norm-test"),
        "batch.theta": (0.9, None),
        "batch.nu": (5.84, None),
        "batch.eta": (None, 0.8),
    }


def test_validation_rows_without_val_size_are_those_of_adloco_paper(tmp_path: Path) -> None:
    without = {key: value for key, value in SHIPPED.items() if key != "val_size"}
    assert settings(written(tmp_path, without))["data.validation_samples"] == 100


def test_their_bert_is_adloco_imdb(tmp_path: Path) -> None:
    found = differences(settings(written(tmp_path, SHIPPED | IMDB)), "adloco-imdb")
    assert found.keys() == {"run.name", "run.rounds", "run.tokens"}


def test_older_names_and_local_sgd(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = settings(written(tmp_path, README))
    # Two devices with four nodes each, for four trainers: two workers each, of three samples.
    expected = {
        "method.num_trainers": 4,
        "method.workers_per_trainer": 2,
        "method.sync_every": 5,
        "batch.initial": 6,
        "batch.rule": "norm-test",
        "batch.eta": 0.1,
        "inner.optimizer": "sgd",
        "inner.lr": 1e-5,
        "inner.momentum": 0.0,
        "inner.weight_decay": 0.0,
        "outer.update": "mean",
        "merge.policy": "none",
        "run.rounds": 2,
    }
    assert {name: found[name] for name in expected} == expected
    said = capsys.readouterr().out
    assert (
        "learning_rate_for_outer_opt: 0.0001 -> no setting\n    Here: outer.lr. LocalSGD has none."
        in said
    )
    assert "not given, so sampling_method" not in said
    assert "not given, so switch_mode: threshold_switch_mode -> switch.mode" in said
    assert "not given, so our defaults hold: training_seed, dataset," in said.replace("\n", " ")


def test_what_is_said_of_each_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, SHIPPED | {"merge_frequncy": 3, "plots": {"deep": [1]}})
    assert main(["convert", str(path)]) == 0
    out = capsys.readouterr().out
    assert "\nnodes_per_gpu: 4 -> method.workers_per_trainer = 1\n    Theirs is" in out
    assert "\nmodel_config.pretrained=True -> model.pretrained = true\n" in out
    assert "\nmerge_frequncy: 3 -> unknown\n" in out and "did you mean merge_frequency?" in out
    assert "\nplots: {'deep': [1]} -> unknown\n" in out
    assert "As single_seed." in out and "As log_dir." in out
    # The recipe says the same, beside each setting.
    text = path.with_suffix(".toml").read_text()
    assert '# dataset: c4\ndataset = "allenai/c4"' in text
    assert "# lr_sgd: 2e-5. Never read.\n" in text
    assert out.endswith(f"adloco train {path.with_suffix('.toml')}\n")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("", "must be a configuration of keys and values"),
        ("- a\n- b\n", "must be a configuration of keys and values"),
        ("a: [1\nb: 2\n", "config.yaml is not valid YAML ("),
        ("a: !!python/name:os.system x\n", "config.yaml is not valid YAML ("),
        ("\x00", "config.yaml is not valid YAML"),
        ("learning_rate: 3\n", "config.yaml has none of the keys that"),
        ("ETA: 0.8\nmodel_config: MicroLlama\n", "but model_config holds none"),
        ("num_inner_steps: many\n", "config.yaml: num_inner_steps must be a whole number > 0, "),
        ("num_inner_steps: true\n", "num_inner_steps must be a whole number > 0, got True"),
        ("num_init_trainers: 0\n", "num_init_trainers must be a whole number > 0, got 0"),
        ("ETA: 1\nnodes_per_gpu:\n", "nodes_per_gpu must be a whole number > 0, got None"),
        ("c4_streaming: [1]\n", "c4_streaming must be true or false, got [1]"),
        ("dataset: wiki\n", "config.yaml: dataset must be one of c4, imdb, got 'wiki'"),
        ("model_type: gpt\n", "model_type must be one of microllama, bert, got 'gpt'"),
        ("model_type: bert\ndataset: c4\n", "dataset must be imdb with model_type bert, got 'c4'"),
        ("padding_percentage: 2\n", "does not give a valid recipe: memory.fraction must be in"),
    ],
)
def test_bad_files(
    given: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", str(written(tmp_path, given))]) == 2
    out, error = capsys.readouterr()
    assert message in error and error.count("\n") == 1 and not out
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


def test_files_that_are_there_or_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, SHIPPED)
    target = tmp_path / "mine.toml"
    target.write_text("kept")
    for words, message in [
        ([str(path), "--to", str(target)], "exists already; name another file with --to"),
        ([str(path), "--to", str(tmp_path / "no" / "a.toml")], "there is no folder"),
        ([str(tmp_path / "none.yaml")], "there is no file"),
        ([str(tmp_path)], "there is no file"),
    ]:
        assert main(["convert", *words]) == 2
        assert message in capsys.readouterr().err
    assert target.read_text() == "kept" and len(list(tmp_path.iterdir())) == 2


def test_a_recipe_with_characters_that_toml_forbids(tmp_path: Path) -> None:
    assert settings(written(tmp_path, 'ETA: 0.8\n"\\u0007": 1\n'))["batch.eta"] == 0.8
    with pytest.raises(ValueError, match=r"run.name must be printable .*, got 'a\\x07b'"):
        convert(written(tmp_path, 'task_name: "a\\u0007b"\n'))


def test_a_key_given_by_both_of_its_names(tmp_path: Path) -> None:
    """The current name goes before the older one."""
    path = written(tmp_path, "ETA: 0.2\ninitial_batch_size: 4\nINITIAL_BATCH_SIZE: 8\n")
    assert settings(path)["batch.initial"] == 4
    assert convert(path).values["batch"]["eta"] == 0.2
    remarks = [key.remark for key in convert(path).keys]
    assert remarks[2] == "Not used, because initial_batch_size is given too."


def test_a_key_that_is_given_twice_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text("merge_frequency: 3\nmerge_frequency: 5\n")
    assert main(["convert", str(tmp_path / "config.yaml")]) == 2
    assert "merge_frequency is given twice" in capsys.readouterr().err


@pytest.mark.nightly
def test_a_converted_recipe_trains(tmp_path: Path, small: list[str]) -> None:
    """On a text of ours instead of C4, with a small model in place of MicroLlama."""
    left_out = {"dataset", "model_type", "model_config", "data_sample_size", "val_size"}
    given = {key: value for key, value in SHIPPED.items() if key not in left_out}
    given |= {"num_outer_steps": 2, "num_inner_steps": 2}
    path = written(tmp_path, given)
    recipe = path.with_suffix(".toml")
    assert main(["convert", str(path)]) == 0
    at = small.index("--run.tokens")
    words = [*small[:at], *small[at + 2 :], "--switch.max_micro_batch", "8"]
    assert main(["train", str(recipe), *words, "--method.sync_every", "2"]) == 0
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 2


def test_what_the_table_cannot_say_is_of_its_keys_and_settings() -> None:
    rows = first_rows()
    assert {*ONLY_WITH, *(other for other, _ in ONLY_WITH.values())} <= rows.keys()
    assert {*COMPUTED} <= {setting for row in read_rows().values() for setting in row.gives}
    assert [row.older for row in rows.values() if row.older][:2] == [
        "number_of_initial_trainers",
        "number_of_training_epochs",
    ]
