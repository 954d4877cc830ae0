"""Tells what the classes of a vLLM have from its source, without running it.

So a release can be judged that is not installed, and on a machine that lacks what some
of its modules import.
"""

import ast
from collections.abc import Callable, Iterator
from functools import cache

from vllm_kvpolicy.api.patch_table import Function, decorators_of, signature_of

Scope = ast.Module | ast.ClassDef
# What has names of its own; those in it are not those of the scope around it.
INNER = (
    *(ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda),
    *(ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp),
)


class VllmSource:
    """The modules of one vLLM.

    Args:
        load: returns the parsed source of a module by its name, None where there is
            none.
    """

    def __init__(self, load: Callable[[str], ast.Module | None]) -> None:
        self._module = cache(load)
        self._definitions = cache(_definitions)
        self._attributes = cache(_attributes)

    def defines(self, target: str) -> bool:
        """Return whether vLLM has a module, class, function, method or attribute.

        A class has what its body names and what its methods assign as attributes; what
        only a base class has does not count.

        Args:
            target: "module:name" or "module:Class.name".
        """
        scope, name = self._scope(target)
        if scope is not None and self._has(scope, name):
            return True
        is_module = "." not in target.partition(":")[2]
        return is_module and self._module(target.replace(":", ".")) is not None

    def signature(self, target: str) -> str | None:
        """Return how a function is declared, see `signature_of`.

        Returns:
            None where vLLM has no such function.
        """
        scope, name = self._scope(target)
        found = None if scope is None else self._definitions(scope).get(name)
        return signature_of(found) if isinstance(found, Function) else None

    def abstract_methods(self, target: str) -> tuple[str, ...]:
        """Return the methods that a class leaves to its subclasses, in order.

        Its own first, then those of its bases in vLLM, where no class before has them.

        Args:
            target: "module:Class".
        """
        found: dict[str, ast.AST] = {}
        for body in self._lineage(target):
            found = found | {
                name: each
                for name, each in self._definitions(body).items()
                if name not in found
            }
        return tuple(name for name, each in found.items() if _is_abstract(each))

    def _lineage(self, target: str) -> Iterator[ast.ClassDef]:
        """Yield a class and then its bases in vLLM, each with its own bases."""
        scope, name = self._scope(target)
        found = None if scope is None else self._definitions(scope).get(name)
        module = target.partition(":")[0]
        if isinstance(found, ast.ClassDef):
            yield found
            for base in found.bases:
                base = base.value if isinstance(base, ast.Subscript) else base
                yield from self._lineage(f"{module}:{ast.unparse(base)}")
        elif isinstance(found, ast.alias) and scope is not None:
            for each in _own_nodes(scope):
                if isinstance(each, ast.ImportFrom) and found in each.names:
                    yield from self._lineage(f"{each.module}:{found.name}")

    def _has(self, scope: Scope, name: str) -> bool:
        """Return whether a module or class defines a name."""
        if name in self._definitions(scope):
            return True
        return isinstance(scope, ast.ClassDef) and name in self._attributes(scope)

    def _scope(self, target: str) -> tuple[Scope | None, str]:
        """Return the module or class that would define a name, and the name."""
        module, _, path = target.partition(":")
        *parents, name = path.split(".")
        scope: Scope | None = self._module(module)
        for parent in parents:
            found = None if scope is None else self._definitions(scope).get(parent)
            scope = found if isinstance(found, ast.ClassDef) else None
        return scope, name


def _definitions(scope: Scope) -> dict[str, ast.AST]:
    """Return what the body of a module or class binds, the last of each name."""
    found: dict[str, ast.AST] = {}
    for node in _own_nodes(scope):
        if isinstance(node, Function):
            if not _is_setter(node):
                found[node.name] = node
        elif isinstance(node, ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.alias):
            found[node.asname or node.name.partition(".")[0]] = node
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found[node.id] = node
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Del):
            found.pop(node.id, None)
    return found


def _own_nodes(scope: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a scope in order, without those of scopes in it."""
    for node in ast.iter_child_nodes(scope):
        yield node
        if not isinstance(node, INNER):
            yield from _own_nodes(node)


def _attributes(body: ast.ClassDef) -> frozenset[str]:
    """Return the attributes that methods assign to the object that they get first."""
    return frozenset(
        node.attr
        for method in _own_nodes(body)
        if isinstance(method, Function) and method.args.args
        for node in ast.walk(method)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == method.args.args[0].arg == "self"
    )


def _is_setter(function: Function) -> bool:
    """Return whether a function adds to a property instead of taking its place."""
    return any(
        isinstance(each, ast.Attribute) and each.attr in ("setter", "deleter")
        for each in function.decorator_list
    )


def _is_abstract(node: ast.AST) -> bool:
    return isinstance(node, Function) and "abstractmethod" in decorators_of(node)
