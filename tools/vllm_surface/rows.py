"""Compares what we rely on in vLLM with what a release of it has.

`rows` lists it: the tables `api.patch_table` and `relied_on`; `imports` lists what the
package imports. Where a release differs from the one that the tables describe, a row of
`compat.RELEASES` says how, and that our code bears it.
"""

import ast
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tools.vllm_surface.relied_on import ANY, OWNERS, Owner
from tools.vllm_surface.source import VllmSource
from vllm_kvpolicy import compat
from vllm_kvpolicy.api.patch_table import PATCHES, Patch

STATES = SAME, CHANGED, GONE = "same", "changed", "gone"
WRAPPED, OVERRIDDEN, READ = "wrapped", "overridden", "read"
ABSTRACT, IMPORTED = "abstract", "imported"


@dataclass(frozen=True)
class Row:
    """One thing that we rely on.

    Args:
        kind: WRAPPED, OVERRIDDEN, READ, ABSTRACT or IMPORTED.
        target: "module:name" or "module:Class.name".
        wanted: how it is declared, in the form of `patch_table.signature_of`, or the
            names of a class's abstract methods, blanks between them; None where it is
            enough that there is one.
    """

    kind: str
    target: str
    wanted: str | None = None


# Returns what a release has for a row, in the form of `Row.wanted`: "" for what is no
# function or class, None where the release has nothing of that name.
Look = Callable[[Row], str | None]


@dataclass(frozen=True)
class Finding:
    """What a release has for a row.

    Args:
        state: of `STATES`.
        is_known: the same, or as `compat.RELEASES` says.
    """

    row: Row
    found: str | None
    state: str
    is_known: bool


def rows(
    patches: Iterable[Patch] = PATCHES, owners: Iterable[Owner] = OWNERS
) -> Iterator[Row]:
    """Yield what the tables list.

    Args:
        patches: what will be wrapped.
        owners: what is overridden and read.
    """
    for patch in patches:
        yield Row(WRAPPED, patch.target, patch.signature)
    for owner in owners:
        if owner.abstract is not None:
            yield Row(ABSTRACT, owner.target, owner.abstract)
        for name, signature in owner.overridden.items():
            wanted = None if signature in (ANY, "") else signature
            yield Row(OVERRIDDEN, owner.path(name), wanted)
        for name in owner.read.split():
            yield Row(READ, owner.path(name), None)


def imports() -> Iterator[Row]:
    """Yield what the modules of the package import from vLLM."""
    targets = set()
    for path in Path(compat.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and _is_of_vllm(node.module):
                targets |= {f"{node.module}:{each.name}" for each in node.names}
    return (Row(IMPORTED, target) for target in sorted(targets))


def _is_of_vllm(module: str | None) -> bool:
    return (module or "").split(".")[0] == "vllm"


def look_into(source: VllmSource) -> Look:
    """Return what looks rows up in a vLLM's modules."""

    def look(row: Row) -> str | None:
        if not source.defines(row.target):
            return None
        if row.kind == ABSTRACT:
            return " ".join(source.abstract_methods(row.target))
        return source.signature(row.target) or ""

    return look


def judge(row: Row, found: str | None, version: str) -> Finding:
    """Return how what a release has compares with a row."""
    if found is None:
        return Finding(row, found, GONE, is_known=False)
    if row.wanted is None or found == row.wanted:
        return Finding(row, found, SAME, is_known=True)
    known = compat.release_of(version).changed.get(row.target)
    return Finding(row, found, CHANGED, is_known=found == known)
