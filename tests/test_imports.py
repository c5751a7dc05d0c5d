"""The search for imports behind the architecture test finds every form of them."""

import pytest

from tests.imports import imported_names


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("import adloco", ["adloco"]),
        ("import os, adloco.rules.batch as batch", ["os", "adloco.rules.batch"]),
        ("from adloco import rules, NormTest", ["adloco.rules", "adloco.NormTest"]),
        ("from adloco.rules.batch import NormTest as Test", ["adloco.rules.batch.NormTest"]),
        ("from adloco.rules import *", ["adloco.rules"]),
        ("from . import worker", ["adloco.algorithms.worker"]),
        ("from .worker import Worker", ["adloco.algorithms.worker.Worker"]),
        ("from .. import cli", ["adloco.cli"]),
        ("from ..cli.main import main", ["adloco.cli.main.main"]),
        ("def late():\n    import adloco.cli", ["adloco.cli"]),
        ("if typing.TYPE_CHECKING:\n    from adloco import cli", ["adloco.cli"]),
        ("importlib.import_module('adloco.cli')", ["adloco.cli"]),
        ("importlib.import_module(name='adloco.cli')", ["adloco.cli"]),
        ("importlib.import_module('..cli', __package__)", ["adloco.cli"]),
        ("import importlib as i\ni.import_module('adloco.cli')", ["importlib", "adloco.cli"]),
        (
            "from importlib import import_module\nimport_module('adloco.cli')",
            ["importlib.import_module", "adloco.cli"],
        ),
        (
            "from importlib import import_module as load\nload('adloco.cli')",
            ["importlib.import_module", "adloco.cli"],
        ),
        ("__import__('adloco.cli')", ["adloco.cli"]),
        ("importlib.import_module(chosen_by_the_user)", []),
        ("text = 'import adloco'  # import adloco", []),
    ],
)
def test_every_form_of_an_import_is_found(source: str, names: list[str]) -> None:
    assert list(imported_names(source, "adloco.algorithms")) == names
