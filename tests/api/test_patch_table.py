"""A start finds a wrapped function that vLLM has changed and no row knows."""

import sys

from vllm_kvpolicy import compat
from vllm_kvpolicy.api import patch_table
from vllm_kvpolicy.api.patch_table import PATCHES, Patch, problems

ARGUMENTS = "vllm.engine.arg_utils:EngineArgs"
SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"


def test_the_table_holds_against_this_vllm():
    assert problems() == []
    assert all(patch.declared() == patch.signature for patch in PATCHES)


def test_a_changed_signature_is_found():
    (problem,) = problems((Patch(f"{ARGUMENTS}.add_cli_args", "x", "", ""),))
    assert problem == (
        f"{ARGUMENTS}.add_cli_args is declared with @staticmethod, parser, expected x: "
        "install vLLM 0.32.x"
    )


def test_what_is_gone_is_found():
    gone = (f"{SCHEDULER}.nothing", "vllm.v1.nothing:f", f"{SCHEDULER}s.add_request")
    found = problems(Patch(target, "self", "", "") for target in gone)
    assert found == [f"vLLM has no {target}: install vLLM 0.32.x" for target in gone]


def test_a_class_in_place_of_a_function_is_found():
    (problem,) = problems((Patch(SCHEDULER, "self", "", ""),))
    assert f"{SCHEDULER} is declared with nothing, expected self" in problem


def test_a_start_knows_the_row_of_its_release(monkeypatch):
    patches = (Patch(f"{SCHEDULER}.add_request", "self request x", "", ""),)
    told = compat.Release("", {f"{SCHEDULER}.add_request": "self request"})
    monkeypatch.setattr(compat, "vllm_version", lambda: "0.34.0")
    assert len(problems(patches)) == 1
    monkeypatch.setitem(compat.RELEASES, "0.34", told)
    assert problems(patches) == []


def test_the_check_imports_nothing():
    patch_table.read_module.cache_clear()
    before = set(sys.modules)
    assert problems() == []
    assert set(sys.modules) == before
