"""Guards of the architecture itself: the arrows between layers, the public names, and who prints."""

import ast
from collections.abc import Iterator
from pathlib import Path

import adloco

SOURCE = Path(adloco.__file__).parent
ALLOWED = {
    "rules": {"rules"},
    "placement": {"placement"},
    "algorithms": {"rules", "placement", "algorithms"},
    "training": {"rules", "placement", "algorithms", "training", "recipes"},
    "cli": {"rules", "placement", "algorithms", "training", "cli"},
}
PUBLIC = {
    "AdLoCo", "AugmentedInnerProductTest", "BatchController", "BatchGuards", "BatchWarmup", "Bf16", "ConstantBatch", "DiLoCo", "InnerOptimizer",
    "InnerProductTest", "Int2", "Int4", "Int8", "LearningRate", "MergeFates", "MergeLargestWithSmallest", "MergeSmallest", "NonFiniteLossError",
    "NormTest", "OneProcess", "OuterOptimizer", "RoundReport", "Source", "SpeedShares", "Streaming", "SwitchMode", "TensorSource", "TopK",
    "estimate", "group_moments", "place", "process_group",
}  # fmt: skip


def modules(layer: str) -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted((SOURCE / layer).rglob("*.py")):
        yield path, ast.parse(path.read_text())


def imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_layers_import_only_what_lies_below() -> None:
    for layer, allowed in ALLOWED.items():
        for path, tree in modules(layer):
            for name in imports(tree):
                parts = name.split(".")
                if parts[0] == "adloco" and len(parts) > 1:
                    assert parts[1] in allowed, f"{path} imports {name}"


def test_rules_know_no_torch_and_only_placement_knows_distribution() -> None:
    for _, tree in modules("rules"):
        assert not [name for name in imports(tree) if name.split(".")[0] in ("torch", "numpy", "transformers")]
    for layer in ("rules", "algorithms", "training", "cli"):
        for path, tree in modules(layer):
            found = [name for name in imports(tree) if name.startswith("torch.distributed") or name == "torch.multiprocessing"]
            assert not found, f"{path} imports {found}"
            assert "DTensor" not in path.read_text()


def test_only_cli_prints() -> None:
    for layer in ("rules", "placement", "algorithms", "training"):
        for path, tree in modules(layer):
            calls = [node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
            assert "print" not in calls, f"{path} prints"
            assert not [name for name in imports(tree) if name.split(".")[0] == "rich"], f"{path} imports rich"


def test_public_names() -> None:
    assert set(adloco.__all__) == PUBLIC
    for name in PUBLIC:
        assert getattr(adloco, name).__doc__, f"{name} has no docstring"


def test_every_module_says_what_it_is_for() -> None:
    for path in SOURCE.rglob("*.py"):
        assert ast.get_docstring(ast.parse(path.read_text())), f"{path} has no docstring"


def test_files_stay_readable() -> None:
    for path in SOURCE.rglob("*.py"):
        assert len(path.read_text().splitlines()) <= 320, f"{path} holds more than one idea"


def test_no_work_at_import() -> None:
    """Importing the package imports neither transformers nor matplotlib, which take seconds."""
    import subprocess
    import sys

    code = "import sys, adloco; print([name for name in ('transformers', 'matplotlib', 'rich', 'pydantic') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
