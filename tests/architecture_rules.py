"""The shape of the package as rules over its syntax trees."""

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

PACKAGE = "vllm_kvpolicy"
Sources = dict[str, str]
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
# A module may import from layers above its own, and from its own folder.
LAYERS: tuple[tuple[str, ...], ...] = (
    (
        "events",
        "hints",
        "protocol",
        "config",
        "config_keys",
        "config_values",
        "compat",
        "policies.names",
        "policies.options",
    ),
    ("kernels",),
    ("policies",),
    ("sizes", "observe"),
    ("block_manager", "worker"),
    ("api",),
    ("plugin", "llm", "commands", "__main__"),
)
# What a checkout has beside the package, and the wheel has not.
BESIDE = {"benchmarks", "docs", "reasoner", "scripts", "support", "tests", "tools"}
BESIDE |= {"training"}
# Imported before anybody asks for a policy: the standard library alone, but for the
# models of options, which loads neither torch nor vLLM.
LEAVES = (
    "events",
    "hints",
    "protocol",
    "config",
    "config_keys",
    "config_values",
    "policies.names",
    "policies.options",
)
LEAF_LIBRARIES = dict.fromkeys(("policies.names", "policies.options"), "pydantic")
# The engine and the worker meet in `protocol`. vLLM finds the manager of a spec in a
# registry of the process that made the spec, so the worker must import the manager.
NAMED_EXCEPTIONS = {("worker.worker", "block_manager.manager")}
MAX_TOP_FILES = 12
MAX_FOLDER_FILES = 30
# Modules that serve every policy, and the methods that they do not know.
SERVES_ALL = (
    "plugin",
    "config",
    "config_keys",
    "config_values",
    "api.patch",
    "api.engine_config",
    "block_manager.scheduler",
)
METHODS = re.compile(r"\b(dms|wgkv|kvzap|duo|quest|triattention|qfilter|epikv)\b", re.I)
# Imports inside functions: only where loading late is the point.
LATE_IMPORTS = ("__init__", "plugin", "api.engine_config")
HOT_FOLDERS = ("worker.", "policies.", "kernels.")
HOST_SYNC = re.compile(
    r"\.(item|tolist|cpu|nonzero)\(|torch\.(unique|nonzero)\(|\.synchronize\("
)
MAX_FILE_LINES = 600
# Longer files, and why: one concept that would be harder to read in pieces.
LONG_FILES = {"api.guards": "one table, a row for each feature that is refused"}
MAX_FUNCTION_LINES = 60
MAX_KERNEL_LINES = 120


def area_of(module: str, areas: Sequence[str]) -> str | None:
    """Return the longest of the areas that a module is, or is in; None for none."""
    found = [area for area in areas if module == area or module.startswith(f"{area}.")]
    return max(found, key=len, default=None)


def layer_of(module: str) -> int | None:
    """Return the layer of a module, the most specific entry first."""
    places = {area: index for index, layer in enumerate(LAYERS) for area in layer}
    area = area_of(module, list(places))
    return None if area is None else places[area]


def imports_of(source: str, modules: Sources) -> Iterator[tuple[ast.AST, str]]:
    """Yield (statement, module) for each import of a module of the package."""
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.ImportFrom) and _is_ours(node.module):
            base = (node.module or "").removeprefix(PACKAGE).lstrip(".")
            names = [f"{base}.{alias.name}".lstrip(".") for alias in node.names]
            names = [name if name in modules else base for name in names]
        elif isinstance(node, ast.Import):
            found = [alias.name for alias in node.names if _is_ours(alias.name)]
            names = [name.removeprefix(PACKAGE).lstrip(".") for name in found]
        for name in names:
            if name in modules:
                yield node, name


def _nodes(
    modules: Sources, kinds: Any, but: Sequence[str] = ()
) -> Iterator[tuple[str, Any]]:
    """Yield the nodes of some kinds with their modules, those in `but` left out."""
    for module, source in modules.items():
        if module not in but:
            tree = ast.walk(ast.parse(source))
            yield from ((module, node) for node in tree if isinstance(node, kinds))


def _lines(modules: Sources) -> Iterator[tuple[str, str, str]]:
    """Yield each module, `module:number` and text of each line."""
    for module, source in modules.items():
        for number, line in enumerate(source.splitlines(), 1):
            yield module, f"{module}:{number}", line


def _is_ours(module: str | None) -> bool:
    return (module or "").split(".")[0] == PACKAGE


def _folder(module: str) -> str:
    return module.rpartition(".")[0]


def _is_init(module: str) -> bool:
    return module.rpartition(".")[2] == "__init__"


def every_module_has_a_room(modules: Sources) -> list[str]:
    """A new file goes into a folder that says what it is part of."""
    homeless = [
        f"{module}: in no layer of tests/architecture_rules.py"
        for module in modules
        if not _is_init(module) and layer_of(module) is None
    ]
    sizes = Counter(_folder(module) for module in modules)
    limits = {"": MAX_TOP_FILES}
    return homeless + [
        f"{folder or PACKAGE}: {size} files"
        for folder, size in sizes.items()
        if size > limits.get(folder, MAX_FOLDER_FILES)
    ]


def imports_run_down(modules: Sources) -> list[str]:
    """No import of a later layer; engine and worker are apart."""
    found = []
    for module, source in modules.items():
        own = layer_of(module)
        if own is None or _is_init(module):
            continue
        for node, target in imports_of(source, modules):
            other = layer_of(target)
            same = _area(module) == _area(target)
            if (
                other is None
                or _is_init(target)
                or (module, target) in NAMED_EXCEPTIONS
            ):
                continue
            if not (other < own or same):
                found.append(f"{module}:{node.lineno}: imports {target}")
    return found


def _area(module: str) -> str | None:
    """Return the folder or leaf of the layers that a module belongs to."""
    leaf = area_of(module, LAYERS[0])
    if leaf is not None:
        return "leaves"
    return area_of(module, [area for layer in LAYERS for area in layer])


def the_package_stands_alone(modules: Sources) -> list[str]:
    """A wheel has the package alone: it imports nothing else of a checkout."""
    return [
        f"{module}:{line}: imports {name}"
        for module, source in modules.items()
        for line, name in _imported(source)
        if name.split(".")[0] in BESIDE
    ]


def leaves_use_the_standard_library(modules: Sources) -> list[str]:
    """The leaves and the `__init__` files load without torch and vLLM."""
    found = []
    for module, source in modules.items():
        library = LEAF_LIBRARIES.get(area_of(module, LEAVES) or "", PACKAGE)
        known = {*sys.stdlib_module_names, PACKAGE, library}
        if area_of(module, LEAVES) is None and not _is_init(module):
            continue
        found += [
            f"{module}:{line}: imports {name}"
            for line, name in _imported(source)
            if name.split(".")[0] not in known or (_is_init(module) and _is_ours(name))
        ]
    return found


def _imported(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the module of each import, of any package."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            yield node.lineno, node.module or ""
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)


def methods_are_named_by_their_files(modules: Sources) -> list[str]:
    """What serves every policy asks the words of a policy, and names no method."""
    return [
        f"{place}: {line.strip()}"
        for module, place, line in _lines(modules)
        if module in SERVES_ALL and METHODS.search(line)
    ]


def no_import_cycles(modules: Sources) -> list[str]:
    """No module imports itself through others."""
    graph = {
        module: {target for _, target in imports_of(source, modules)}
        for module, source in modules.items()
    }
    found: list[str] = []
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> None:
        if module in path:
            found.append(" -> ".join([*path[path.index(module) :], module]))
        elif module not in done:
            for target in sorted(graph[module]):
                visit(target, [*path, module])
            done.add(module)

    for module in sorted(graph):
        visit(module, [])
    return found


def imports_stand_at_the_top(modules: Sources) -> list[str]:
    """Imports of the package within functions hide the shape."""
    found = []
    for module, source in modules.items():
        if module in LATE_IMPORTS:
            continue
        top = set(ast.parse(source).body)
        lines = {node.lineno for node in top}
        found += [
            f"{module}:{node.lineno}: imports {target} late"
            for node, target in imports_of(source, modules)
            if node.lineno not in lines
        ]
    return found


def files_and_functions_are_small(modules: Sources) -> list[str]:
    """A file holds one concept; a longer one needs a reason in LONG_FILES."""
    sizes = {module: len(source.splitlines()) for module, source in modules.items()}
    found = [
        f"{module}: {lines} lines"
        for module, lines in sizes.items()
        if lines > MAX_FILE_LINES and not LONG_FILES.get(module)
    ]
    for module, node in _nodes(modules, FUNCTIONS):
        is_kernel = any("jit" in ast.unparse(item) for item in node.decorator_list)
        limit = MAX_KERNEL_LINES if is_kernel else MAX_FUNCTION_LINES
        lines = node.end_lineno - node.lineno + 1
        if lines > limit:
            found.append(f"{module}:{node.lineno}: {node.name} has {lines} lines")
    return found


def no_environment_variables(modules: Sources) -> list[str]:
    """Behaviour comes from the configuration; compat alone reads the environment."""
    found = []
    kinds = ast.Attribute | ast.ImportFrom
    for module, node in _nodes(modules, kinds, ["compat"]):
        names = [node.attr] if isinstance(node, ast.Attribute) else []
        if isinstance(node, ast.ImportFrom) and node.module in ("os", "vllm"):
            names = [alias.name for alias in node.names]
        found += [
            f"{module}:{node.lineno}: reads the environment ({name})"
            for name in names
            if name in ("environ", "getenv", "envs")
        ]
    return found


def only_compat_reads_versions(modules: Sources) -> list[str]:
    """What depends on a version stands in one file."""
    return [
        f"{module}:{node.lineno}: reads {ast.unparse(node)}"
        for module, node in _nodes(modules, ast.Attribute, ["compat"])
        if node.attr == "__version__"
    ]


def only_patch_assigns_onto_vllm(modules: Sources) -> list[str]:
    """Objects of vLLM are changed in one file."""
    found = []
    for module, source in modules.items():
        if module == "api.patch":
            continue
        tree = ast.parse(source)
        foreign = _names_of_vllm(tree)
        for node in ast.walk(tree):
            targets: list[ast.expr] = []
            if isinstance(node, ast.Assign):
                targets = node.targets
            elif isinstance(node, ast.AugAssign | ast.AnnAssign):
                targets = [node.target]
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr":
                targets = [ast.Attribute(node.args[0], "?", ast.Load())]
            found += [
                f"{module}:{node.lineno}: changes {ast.unparse(target)}"
                for target in targets
                if isinstance(target, ast.Attribute) and _head(target) in foreign
            ]
    return found


def _names_of_vllm(tree: ast.AST) -> set[str]:
    """Return the names that a module has from vLLM, aliases included."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            if (node.module or "").split(".")[0] == "vllm":
                names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "vllm":
                    names.add((alias.asname or alias.name).split(".")[0])
    for node in ast.walk(tree):
        is_alias = isinstance(node, ast.Assign) and isinstance(
            node.value, ast.Name | ast.Attribute
        )
        if is_alias and _head(node.value) in names:
            names |= {item.id for item in node.targets if isinstance(item, ast.Name)}
    return names


def _head(node: ast.AST) -> str | None:
    """Return the first name of `a.b[c].d()`."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else None


def hot_modules_do_not_sync(modules: Sources) -> list[str]:
    """A line that waits for the device says why: `sync-ok: reason`."""
    return [
        f"{place}: {line.strip()}"
        for module, place, line in _lines(modules)
        if module.startswith(HOT_FOLDERS)
        if HOST_SYNC.search(line.split("#")[0]) and "sync-ok:" not in line
    ]


def hot_modules_fill_by_index(modules: Sources) -> list[str]:
    """`x[index] = 0` copies the number to the device and waits: `index_fill_` not.

    What is no tensor of the device says so: `sync-ok: numpy`.
    """
    found = []
    for module, source in modules.items():
        if not module.startswith(HOT_FOLDERS):
            continue
        lines = source.splitlines()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Assign) and _is_number(node.value):
                line = lines[node.lineno - 1]
                if any(map(_has_index, node.targets)) and "sync-ok:" not in line:
                    found.append(f"{module}:{node.lineno}: {line.strip()}")
    return found


def _is_number(node: ast.AST) -> bool:
    """Return whether it is a number, or the name of one by how it is written."""
    if isinstance(node, ast.UnaryOp):
        return _is_number(node.operand)
    if isinstance(node, ast.Constant):
        return isinstance(node.value, int | float)
    name = getattr(node, "id", getattr(node, "attr", ""))
    return name.isupper() or name in ("nan", "inf")


def _has_index(node: ast.AST) -> bool:
    """Return whether an assignment goes to places that a variable lists."""
    if not isinstance(node, ast.Subscript):
        return False
    parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    return not all(
        isinstance(part, ast.Slice | ast.Constant | ast.UnaryOp) for part in parts
    )


PACKAGE_RULES = (
    every_module_has_a_room,
    imports_run_down,
    the_package_stands_alone,
    leaves_use_the_standard_library,
    methods_are_named_by_their_files,
    no_import_cycles,
    imports_stand_at_the_top,
    files_and_functions_are_small,
    no_environment_variables,
    only_compat_reads_versions,
    only_patch_assigns_onto_vllm,
    hot_modules_do_not_sync,
    hot_modules_fill_by_index,
)


def tests_can_fail(sources: Sources) -> list[str]:
    """Every test asserts, and none returns early, which would count as a pass."""
    found = []
    for module, source in sources.items():
        asserting = _asserting_helpers(ast.parse(source))
        for _, node in _nodes({module: source}, FUNCTIONS):
            if not node.name.startswith("test_"):
                continue
            if not _asserts(node, asserting):
                found.append(f"{module}:{node.lineno}: {node.name} asserts nothing")
            found += [
                f"{module}:{item.lineno}: {node.name} returns early; use pytest.skip"
                for item in _own_nodes(node)
                if isinstance(item, ast.Return)
            ]
    return found


def _asserting_helpers(tree: ast.AST) -> set[str]:
    """Return the functions of a file that assert themselves."""
    return {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("test_")
        if _asserts(node, set())
    }


def _asserts(node: ast.AST, helpers: set[str]) -> bool:
    for item in ast.walk(node):
        if isinstance(item, ast.Assert):
            return True
        if isinstance(item, ast.Call):
            name = ast.unparse(item.func).rpartition(".")[2]
            if name in ("raises", "fail") or name.startswith(("assert_", "check_")):
                return True
            if name in helpers:
                return True
    return False


def _own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function without those of functions inside it."""
    for child in ast.iter_child_nodes(function):
        if isinstance(child, FUNCTIONS | ast.Lambda):
            continue
        yield child
        yield from _own_nodes(child)
