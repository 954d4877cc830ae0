"""Compiled models, as `vllm serve` runs them: right, and compiled once for all budgets.

vLLM finds compiled code by its key.
"""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from support.engine.helpers import make_jobs
from support.engine.run_compiled import run_elsewhere
from support.made_adapters import make_adapter

VALUES = {"budget": 96, "interval": 40, "prefill_interval": 128}
SERVE_MODE = 2  # DYNAMO_TRACE_ONCE, what vLLM takes on CPU
FOLDER = "cache/torch_compile_cache/torch_aot_compile"


def spec_of(model: Path, policy: dict[str, Any] | None, **changes: Any) -> dict:
    """Return what `run_elsewhere` takes; jobs that make policies drop tokens."""
    return {
        "model": str(model),
        "policy": policy and {**VALUES, **policy},
        "changes": {"max_num_seqs": 4, "enforce_eager": False, **changes},
        "jobs": [asdict(job) for job in make_jobs((40, 150, 300), 120, seed=60)],
    }


def save_adapter(path: Path, is_flipped: bool) -> str:
    """Write an adapter for the tiny model and return its path."""
    adapter = make_adapter(2, 2, 64, window=32)
    if is_flipped:
        flipped = {name: t.flip(-1) for name, t in adapter.tensors.items()}
        adapter = replace(adapter, tensors=flipped)
    adapter.save(path)
    return str(path)


@pytest.mark.slow
def test_compiled_is_eager(tiny_model: Path, tmp_path: Path) -> None:
    """`identity` is stock, `ams-tova` is its own eager run."""
    policies = (None, {"policy": "identity"}, {"policy": "ams-tova"})
    stock, identity, ams, eager = run_elsewhere(
        [
            *(spec_of(tiny_model, policy) for policy in policies),
            spec_of(tiny_model, policies[-1], enforce_eager=True),
        ],
        tmp_path,
    )
    assert {found["mode"] for found in (stock, identity, ams)} == {SERVE_MODE}
    assert list(tmp_path.glob("cache/torch_compile_cache/*"))
    assert identity["tokens"] == stock["tokens"]
    assert identity["counters"]["events"] >= 10
    assert ams["tokens"] == eager["tokens"]
    assert ams["tokens"] != stock["tokens"]
    assert ams["counters"]["events"] == eager["counters"]["events"] >= 10
    dropped = [found["counters"]["tokens_dropped"] for found in (ams, eager)]
    assert dropped[0] == dropped[1] > 0


@pytest.mark.slow
def test_one_compilation_for_all_numbers(tiny_model: Path, tmp_path: Path) -> None:
    """Engines share compiled code where their hooks are alike, and nowhere else.

    Policies without hooks run one graph, whatever their tier and budget. An adapter
    computes in another one, where its weights are buffers.
    """
    adapters = [save_adapter(tmp_path / "0", False), save_adapter(tmp_path / "1", True)]
    policies = {
        "equal": {"policy": "ams-tova"},
        "ragged": {"policy": "adakv-snapkv", "budget": 160, "interval": 64},
        "hooked": {"policy": "dms", "policy_config": {"dms_adapter": adapters[0]}},
        "same hooks": {"policy": "dms", "policy_config": {"dms_adapter": adapters[1]}},
    }
    specs = [spec_of(tiny_model, policy) for policy in policies.values()]
    eager = [
        spec_of(tiny_model, each, enforce_eager=True) for each in policies.values()
    ]
    answers = run_elsewhere([*specs, *eager], tmp_path)
    found = dict(zip(policies, answers, strict=False))
    wanted = dict(zip(policies, answers[len(policies) :], strict=True))
    # vLLM 0.32 keeps what it compiles in a folder named by its key, but cannot load it
    # in the mode of a CPU ("no attribute 'finalize_loading'"): so keys are compared
    # here, not compilations.
    keys = {name: each["key"] for name, each in found.items()}
    assert all((tmp_path / FOLDER / key).is_dir() and key for key in keys.values())
    assert keys["equal"] == keys["ragged"] != keys["hooked"] == keys["same hooks"]
    for name in policies:
        assert found[name]["mode"] == SERVE_MODE
        assert found[name]["tokens"] == wanted[name]["tokens"], name
        assert found[name]["counters"]["tokens_dropped"] > 0, name
        assert not wanted[name]["key"]
    assert len({str(each["tokens"]) for each in found.values()}) == len(policies)
