"""One request passes the files that the package's docstring names, in their order."""

import ast
import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.programs import run_program

PACKAGE = Path(__file__).parents[1] / "vllm_kvpolicy"
# Rooms whose files must all be named if the request passes them, but for these.
WHOLE_ROOMS = ("api.", "block_manager.")
UNNAMED = {
    "api.patch_table": "rows that api.patch reads",
    "api.chats": "chats that pin their system messages, or give hints about any",
    "api.evidence": "tells what no test has run on a GPU",
    "hints": "requests that say what stays and what goes first",
    "worker.hints": "the same",
    "block_manager.output_lengths": "learns from answers that stop by themselves",
    "block_manager.counting": "adds to counters, the same without a policy",
    "block_manager.sharing": "counts what requests share of the prefix cache",
    "block_manager.pressure": "calls for events where positions are not fixed",
}
# A line of the docstring: two spaces, what happens, then files from first to last.
AT_START = ("flag", "refuse", "worker")
LINE = re.compile(r"^  (\w+) +((?:[\w.]+ > )*[\w.]+)$", re.M)


@dataclass(frozen=True)
class Walk:
    """What a request passed; modules without the package's name.

    Attributes:
        start: modules called until the engine was there, by first call.
        serve: modules called while it served the request, by first call.
        stacks: modules on the stack at calls of kernels, the kernels included.
        num_tokens: generated tokens.
    """

    start: list[str]
    serve: list[str]
    stacks: list[list[str]]
    num_tokens: int


@pytest.fixture(scope="module")
def walk(tiny_model: Path) -> Walk:
    """Serve one request of an equal-length policy, in a process of its own."""
    printed = run_program("support.engine.main_path", tiny_model)
    found = json.loads(printed.splitlines()[-1])
    called = found.pop("called")
    return Walk(called["start"], called["serve"], **found)


def main_path() -> dict[str, list[str]]:
    """Return the names of each line of the docstring's main path, by what happens."""
    docstring = ast.get_docstring(ast.parse((PACKAGE / "__init__.py").read_text()))
    _, found, path = (docstring or "").partition("Main path")
    assert found
    return {what: names.split(" > ") for what, names in LINE.findall(path)}


def problems(path: dict[str, list[str]], walk: Walk) -> list[str]:
    """Say what is wrong with a main path; a folder stands for any file in it."""
    found = []
    for what, names in path.items():
        called = walk.start if what in AT_START else walk.serve
        firsts = [first_call(name, called) for name in names]
        missing = [name for name, first in zip(names, firsts, strict=True) if not first]
        found += [f"{what}: the request does not pass {name}" for name in missing]
        ordered = [first for first in firsts if first]
        if ordered != sorted(ordered):
            found.append(f"{what}: the request passes these files in another order")
    named = {name for names in path.values() for name in names}
    return found + [
        f"leaves out {module}"
        for module in sorted(main_steps(walk))
        if not any(is_in(module, name) for name in named)
    ]


def is_in(module: str, name: str) -> bool:
    """Return whether a name is that of a module or of a folder above it."""
    return module == name or module.startswith(f"{name}.")


def first_call(name: str, called: list[str]) -> int:
    """Return when a file, or the first of a folder, was called; 1 is first, 0 never."""
    places = (at for at, module in enumerate(called, 1) if is_in(module, name))
    return next(places, 0)


def main_steps(walk: Walk) -> set[str]:
    """Return the files that must be named.

    Those on the way to a kernel, those of `WHOLE_ROOMS`, and kernels as a whole.
    """
    on_stacks = {
        module
        for stack in walk.stacks
        for module in stack
        if not module.startswith("kernels.")
    }
    whole = {
        module
        for module in walk.start + walk.serve
        if module.startswith(WHOLE_ROOMS) and module not in UNNAMED
    }
    return {"kernels"} | on_stacks | whole


def test_a_request_passes_the_main_path(walk: Walk) -> None:
    assert problems(main_path(), walk) == []


def test_the_walk_has_an_event(walk: Walk) -> None:
    """An equal-length policy chose tokens, moved them, and read a table of the rest."""
    assert walk.num_tokens == 64
    kernels = {module for stack in walk.stacks for module in stack}
    assert {"kernels.segment_quota", "kernels.compact_pages"} <= kernels
    assert "kernels.page_tables" in kernels


def test_what_is_unnamed_is_passed(walk: Walk) -> None:
    assert UNNAMED.keys() <= {*walk.start, *walk.serve}
