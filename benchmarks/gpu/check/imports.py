"""Imports what groups of checks run: what can be tried of them without a GPU."""

import ast
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.gpu.check.groups import GROUPS
from vllm_kvpolicy import compat

OURS = ("benchmarks", "reasoner", "support", "vllm_kvpolicy")
# What a machine without a GPU may lack.
EXTRAS = ("flashinfer", "matplotlib", "pytest")


def check_imports(checks: Any) -> None:
    """Import every group, the backends, and what functions of all that import."""
    for name, group in GROUPS.items():
        with checks.case(f"imports of {name}"):
            assert callable(group.function)
    for name, path in compat.GPU_BACKENDS.items():
        with checks.case(f"backend {name}") as notes:
            notes += found(*path.rsplit(".", 1))
    with checks.case("imports inside functions") as notes:
        seen: set[str] = set()
        names: set[tuple[str, str]] = set()
        while new := loaded() - seen:
            seen |= new
            wanted = {pair for module in new for pair in inside_functions(module)}
            notes += [note for pair in sorted(wanted - names) for note in found(*pair)]
            names |= wanted
        notes.insert(0, f"{len(names)} names in {len(seen)} modules")


def loaded() -> set[str]:
    """Return our modules that are imported so far."""
    return {name for name in sys.modules if name.partition(".")[0] in OURS}


def inside_functions(module: str) -> Iterator[tuple[str, str]]:
    """Yield (module, attribute) of all that functions of a module import.

    The attribute is "" for `import module`.
    """
    path = getattr(sys.modules[module], "__file__", None)
    if path is None or not path.endswith(".py"):  # a folder, or compiled
        return
    for function in ast.walk(ast.parse(Path(path).read_text())):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.Import):
                yield from ((alias.name, "") for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                yield from ((node.module, alias.name) for alias in node.names)


def found(module: str, attribute: str) -> list[str]:
    """Import a name; return a note instead where an extra is not installed.

    Raises:
        ImportError: something else is missing, or the module does not have the name.
    """
    try:
        home = import_module(module)
        if attribute and not hasattr(home, attribute):
            import_module(f"{module}.{attribute}")
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            raise
        return [f"NOT TRIED: {module}, {error.name} is not installed"]
    return []
