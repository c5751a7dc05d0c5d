"""Guards of the architecture itself: the arrows between rooms, the public names, and who prints."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import adloco
from tests.imports import imported_names
from tests.pages import NEEDS_ELASTIC

SOURCE = Path(adloco.__file__).parent
ROOMS = {
    "errors": set(),
    "setting": set(),
    "metric": set(),
    "discovery": set(),
    "options": {"discovery", "metric", "algorithms", "rules"},
    "metrics": {"metric", "options"},
    "dotted_path": {"errors"},
    "late": set(),
    "hub_access": set(),
    "whole_file": set(),
    "public": {"errors", "rules", "distributed", "algorithms", "data"},
    "rules": {"errors", "setting"},
    "tracking": set(),
    "distributed": {"errors", "setting", "late"},
    "algorithms": {
        "errors",
        "setting",
        "late",
        "dotted_path",
        "metric",
        "rules",
        "distributed",
    },
    "models": {
        "errors",
        "setting",
        "dotted_path",
        "hub_access",
        "rules",
        "distributed",
        "algorithms",
    },
    "data": {
        "errors",
        "hub_access",
        "setting",
        "dotted_path",
        "whole_file",
        "rules",
        "distributed",
        "algorithms",
    },
    "tasks": {
        "errors",
        "setting",
        "metrics",
        "rules",
        "distributed",
        "algorithms",
        "models",
        "data",
    },
    "config": {
        "errors",
        "setting",
        "discovery",
        "options",
        "dotted_path",
        "rules",
        "distributed",
        "algorithms",
        "models",
        "data",
        "tasks",
        "tracking",
        "recipes",
    },
    "run": {
        "errors",
        "discovery",
        "setting",
        "options",
        "late",
        "whole_file",
        "metrics",
        "rules",
        "distributed",
        "algorithms",
        "models",
        "data",
        "tasks",
        "tracking",
        "config",
    },
    "elastic": {"errors", "whole_file", "distributed", "algorithms", "config", "run"},
    "plan": {
        "errors",
        "setting",
        "whole_file",
        "metrics",
        "rules",
        "distributed",
        "algorithms",
        "config",
        "run",
    },
    "cluster": {"errors", "dotted_path", "distributed", "algorithms", "config", "run", "plan"},
    "study": {
        "errors",
        "setting",
        "metric",
        "metrics",
        "rules",
        "distributed",
        "config",
        "run",
        "plan",
    },
    "report": {
        "errors",
        "discovery",
        "options",
        "whole_file",
        "metrics",
        "rules",
        "distributed",
        "algorithms",
        "models",
        "data",
        "tasks",
        "config",
        "run",
        "plan",
        "study",
    },
    "api": {
        "errors",
        "metrics",
        "distributed",
        "algorithms",
        "data",
        "config",
        "run",
        "cli",
    },
    "cli": {
        "errors",
        "setting",
        "discovery",
        "options",
        "whole_file",
        "metrics",
        "rules",
        "distributed",
        "algorithms",
        "models",
        "data",
        "tasks",
        "config",
        "run",
        "elastic",
        "plan",
        "study",
        "cluster",
        "report",
    },
}
"""What each room may import besides itself: only rooms below it. Nothing imports lab."""
# A copy of the tree in `make removable` lacks one of these.
if not (SOURCE / "elastic").exists():
    del ROOMS["elastic"]
if (SOURCE / "lab").exists():
    ROOMS["lab"] = {*ROOMS} - {"api", "public", "elastic"}

DISTRIBUTED = {
    "dtensor": set(),
    "device": set(),
    "device_memory": set(),
    "traffic": {"dtensor"},
    "wire": set(),
    "plain_state": set(),
    "messages": {"plain_state"},
    "all_to_all": set(),
    "torch_versions": set(),
    "parallel": {"dtensor", "device_memory", "traffic", "all_to_all", "torch_versions"},
    "comm": {"dtensor", "device", "traffic", "wire", "parallel", "all_to_all", "torch_versions"},
    "placement": {"dtensor", "device", "traffic", "messages", "parallel", "comm"},
    "launch": {"messages", "placement"},
    "testing": set(),
}
"""The same inside `distributed`."""

CLI = re.compile(r"adloco\.cli\b")

LARGEST_SHARE = 0.2
"""Of the code, in one room."""

PUBLIC = {
    "AdLoCo",
    "BatchController",
    "BatchGuards",
    "BatchWarmup",
    "Batching",
    "Bf16",
    "ConstantBatch",
    "DiLoCo",
    "Execution",
    "Feedback",
    "GradientTest",
    "InnerAdamW",
    "InnerMuon",
    "InnerSGD",
    "Int1",
    "Int2",
    "Int4",
    "Int8",
    "LearningRate",
    "MergeFates",
    "MergeLargestWithSmallest",
    "MergeSmallest",
    "Merging",
    "Method",
    "NonFiniteLossError",
    "NormTest",
    "OneProcess",
    "OuterMemory",
    "OuterOptimizer",
    "Problem",
    "RoundReport",
    "Source",
    "SpeedShares",
    "Streaming",
    "SwitchMode",
    "Syncing",
    "TensorSource",
    "TrainedRun",
    "estimate",
    "group_moments",
    "load",
    "place",
    "process_group",
    "train",
}


def modules(room: str) -> Iterator[tuple[Path, ast.Module]]:
    """The modules of a room: a folder, or one file."""
    folder = SOURCE / room
    for path in sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]:
        yield path, parsed(path)


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports(path: Path) -> list[str]:
    """Dotted names of everything that a file of the package imports."""
    package = ".".join(("adloco", *path.relative_to(SOURCE).parent.parts))
    return list(imported_names(path.read_text(), package))


def reached(name: str, inside: str) -> str | None:
    """The room of a package that an import reaches into.

    "top" for the package itself and its public names, None for what lies elsewhere.
    """
    if name != inside and not name.startswith(f"{inside}."):
        return None
    folder = SOURCE.parent / inside.replace(".", "/")
    first = name.removeprefix(inside).removeprefix(".").split(".")[0]
    return first if first in {path.stem for path in folder.iterdir()} else "top"


def check_arrows(inside: str, allowed: dict[str, set[str]]) -> None:
    """Every room of a package is in the table and imports only itself and what the table allows."""
    folder = SOURCE.parent / inside.replace(".", "/")
    found = {
        path.stem
        for path in folder.iterdir()
        if (path.is_dir() and list(path.glob("*.py"))) or path.suffix == ".py"
    }
    assert found - {"__init__", "__main__", "recipes"} == set(allowed), (
        "a room is missing in the table"
    )
    for room, below in allowed.items():
        for path, _ in modules(str((folder / room).relative_to(SOURCE))):
            for name in imports(path):
                assert reached(name, inside) in {None, room, *below}, f"{path} imports {name}"


def test_imports_are_absolute() -> None:
    for path in SOURCE.rglob("*.py"):
        nodes = ast.walk(parsed(path))
        found = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.level > 0]
        assert not found, f"{path} has relative imports"


@pytest.mark.parametrize(
    ("name", "inside", "expected"),
    [
        ("adloco", "adloco", "top"),
        ("adloco.NormTest", "adloco", "top"),
        ("adloco.rules", "adloco", "rules"),
        ("adloco.rules.merge.Merge", "adloco", "rules"),
        ("adloco.__main__", "adloco", "__main__"),
        ("adloco_elsewhere.rules", "adloco", None),
        ("torch", "adloco", None),
        ("adloco.distributed.comm.sync_stats", "adloco.distributed", "comm"),
        ("adloco.distributed.dtensor", "adloco.distributed", "dtensor"),
        ("adloco.distributed", "adloco.distributed", "top"),
        ("adloco.rules", "adloco.distributed", None),
    ],
)
def test_imports_are_told_apart_by_room(name: str, inside: str, expected: str | None) -> None:
    assert reached(name, inside) == expected


@NEEDS_ELASTIC
def test_rooms_import_only_what_lies_below() -> None:
    check_arrows("adloco", ROOMS)
    check_arrows("adloco.distributed", DISTRIBUTED)


def test_the_tables_have_no_circles() -> None:
    for table in (ROOMS, DISTRIBUTED):
        TopologicalSorter(table).prepare()


def test_no_room_holds_too_much() -> None:
    """The rooms of `distributed` count by themselves."""
    rooms = [room for room in ROOMS if room != "distributed"]
    rooms += [f"distributed/{room}" for room in DISTRIBUTED]
    lines = {
        room: sum(len(path.read_text().splitlines()) for path, _ in modules(room)) for room in rooms
    }
    assert max(lines.values()) <= LARGEST_SHARE * sum(lines.values()), lines


def test_no_two_files_share_a_name() -> None:
    # A folder of lab/ is found by the names of its modules, which are the same in each.
    paths = (path for path in SOURCE.rglob("*.py") if "lab" not in path.parts)
    names = Counter(path.name for path in paths if path.name != "__init__.py")
    assert not [name for name, count in names.items() if count > 1]


def test_rules_know_no_torch_and_only_distributed_knows_distribution() -> None:
    for path, _ in modules("rules"):
        forbidden = {"torch", "numpy", "transformers"}
        assert not [name for name in imports(path) if name.split(".")[0] in forbidden]
    for room in set(ROOMS) - {"distributed"}:
        for path, _ in modules(room):
            knowing = ("torch.distributed", "torch.multiprocessing")
            found = [name for name in imports(path) if name.startswith(knowing)]
            assert not found, f"{path} imports {found}"
            assert "DTensor" not in path.read_text()
    tensor = "torch.distributed.tensor"
    files = [path for path, _ in modules("distributed")]
    knowing = {path.name for path in files for name in imports(path) if name.startswith(tensor)}
    assert knowing == {"dtensor.py"}


def test_only_cli_prints() -> None:
    for room in set(ROOMS) - {"cli"}:
        for path, tree in modules(room):
            if room == "lab" and path.name == "command.py":  # What a folder adds to cli.
                continue
            assert room == "api" or not any(map(CLI.match, imports(path))), f"{path} imports cli"
            calls = [
                node.func.id
                for node in ast.walk(tree)
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
            ]
            assert "print" not in calls, f"{path} prints"
            drawing = [name for name in imports(path) if name.split(".")[0] == "rich"]
            assert not drawing, f"{path} imports rich"


def test_public_names() -> None:
    assert set(adloco.__all__) == PUBLIC
    for name in PUBLIC:
        assert getattr(adloco, name).__doc__, f"{name} has no docstring"
    assert set(dir(adloco)) >= PUBLIC
    with pytest.raises(AttributeError, match="module 'adloco' has no attribute 'Adloco'"):
        _ = adloco.Adloco


def test_every_module_says_what_it_is_for() -> None:
    for path in SOURCE.rglob("*.py"):
        assert ast.get_docstring(parsed(path)), f"{path} has no docstring"


def test_files_stay_readable() -> None:
    for path in SOURCE.rglob("*.py"):
        assert len(path.read_text().splitlines()) <= 500, f"{path} holds more than one idea"


def test_no_work_at_import() -> None:
    """Importing the package, what a process of `adloco prepare` runs, and the public names, imports
    nothing that they can do without.
    """
    import subprocess
    import sys

    code = (
        "import sys, adloco, adloco.data.encoding; "
        "slow = {'transformers', 'matplotlib', 'rich', 'pydantic'}; "
        "print(sorted((slow | {'torch'}) & set(sys.modules))); "
        "from adloco import AdLoCo; print(sorted(slow & set(sys.modules)))"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        == "[]\n[]\n"
    )


def test_tests_reach_into_no_private_attributes() -> None:
    """A run is disturbed by what a user could hand in: a source, a clock, a phase, a hook."""
    files = {*Path(__file__).parent.rglob("*.py")}
    # It stands in for a part of torch, and reaches into torch alone.
    files -= {Path(__file__).parent / "simulated_gpus" / "simulated.py"}
    for file in sorted(files):
        private = [
            f"{file.name}:{node.lineno} {node.attr}"
            for node in ast.walk(ast.parse(file.read_text()))
            if isinstance(node, ast.Attribute)
            and node.attr.startswith("_")
            and not node.attr.startswith("__")
            and not (isinstance(node.value, ast.Name) and node.value.id == "self")
        ]
        assert not private
