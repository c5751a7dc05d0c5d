"""Which modules a Python source imports, in whatever form it does so."""

import ast
from collections.abc import Iterator
from importlib.util import resolve_name


def imported_names(source: str, package: str) -> Iterator[str]:
    """Absolute dotted names of all imports, also those inside functions.

    `import a.b` gives a.b, and `from a import b` gives a.b, whether b is a module or a name in a.
    Calls of `importlib.import_module` and `__import__` count where the module is a literal.

    Args:
        source: Text of a Python file.
        package: Dotted name of the package that relative imports start from.
    """
    tree = ast.parse(source)
    importers = {"import_module", "__import__"} | _aliases_of_import_module(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = resolve_name("." * node.level + (node.module or ""), package)
            # Everything that a package holds may be meant by a star.
            for alias in node.names:
                yield module if alias.name == "*" else f"{module}.{alias.name}"
        elif isinstance(node, ast.Call) and _called_name(node) in importers:
            by_name = [keyword.value for keyword in node.keywords if keyword.arg == "name"]
            for argument in [*node.args[:1], *by_name]:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield resolve_name(argument.value, package)


def _aliases_of_import_module(tree: ast.Module) -> set[str]:
    """Names under which the file knows `importlib.import_module`."""
    return {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "importlib"
        for alias in node.names
        if alias.name == "import_module"
    }


def _called_name(call: ast.Call) -> str | None:
    """Last part of the name of what is called: import_module in importlib.import_module(...)."""
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else None
