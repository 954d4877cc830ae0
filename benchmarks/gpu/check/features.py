"""Features that were never tried on a GPU, or not enough."""

import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.check.engines import BASE, assert_whole, on_gpu, one_of_each
from benchmarks.gpu.check.where import assert_given_back
from support.made_adapters import make_adapter
from support.made_gates import make_gates
from support.made_patterns import write_pattern
from support.made_surrogates import write_surrogate
from vllm_kvpolicy.commands.judge import PASSED
from vllm_kvpolicy.commands.trials import TRIALS
from vllm_kvpolicy.commands.verify_engine import trial_checks
from vllm_kvpolicy.config import KVPolicyConfig

LAYERS, HEADS, HEAD_DIM, HIDDEN = 6, 2, 32, 320
"""Of the packaged model."""
WORDS = {
    "DMS": ("dms", "dms+ams-tova"),
    "KVzap": ("kvzap", "kvzap+snapkv"),
    "DuoAttention": ("duo", "duo+ams-tova"),
    "WG-KV": ("wgkv", "wgkv+ams-tova"),
    "Quest": ("streaming+quest", "ams-tova+quest"),
    "merging": ("hard-snapkv", "hard-tova"),
}


def options_for(words: Sequence[str], folder: Path) -> dict[str, Any]:
    """Write the files that policies need for the packaged model; return options."""
    found: dict[str, Any] = {}
    window = {"window": BASE["recent"]}
    for word in words:
        kind = word.partition("+")[0]
        if kind == "dms":
            make_adapter(LAYERS, HEADS, HIDDEN, **window).save(folder / "dms")
            found["dms_adapter"] = str(folder / "dms")
        elif kind == "kvzap":
            write_surrogate(folder / "kvzap", LAYERS, HEADS, HIDDEN, units=16)
            found |= {"kvzap_model": str(folder / "kvzap"), "kvzap_threshold": -4.0}
        elif kind == "duo":
            use = np.linspace(0.1, 0.9, LAYERS * HEADS).reshape(LAYERS, -1)
            sizes = BASE["sinks"], BASE["recent"]
            found["duo_pattern"] = str(write_pattern(folder / "duo", use, *sizes))
        elif kind == "wgkv":
            fields = {**window, "rope_theta": 1e4, "flavour": "qwen3"}
            make_gates(LAYERS, HEADS, HEAD_DIM, **fields).save(folder / "wgkv")
            found["wgkv_gates"] = str(folder / "wgkv")
    return found


def check_words(checks: Any) -> None:
    """Serve each kind of policy that needs a file, or an option, on its own server."""
    where = on_gpu("TRITON_ATTN")
    for label, words in WORDS.items():
        with checks.case(label) as notes, tempfile.TemporaryDirectory() as folder:
            options = options_for(words, Path(folder))
            if label == "merging":
                options["hard_merge"] = True
            policy = {**BASE, "policy": words[0], "allow": list(words[1:])}
            policy["policy_config"] = options
            jobs = one_of_each(words * 3, where.policy_tokens)
            jobs = [
                replace(job, name=f"{job.name} {number}")
                for number, job in enumerate(jobs)
            ]
            with where.engine(policy) as engine:
                run = engine.run(jobs)
                assert_whole(run, jobs)
                assert_given_back(engine)
                counters = engine.counters()
            notes.append(f"{counters['events']:.0f} events")
            notes.append(f"{counters['tokens_dropped']:.0f} tokens dropped")
            notes.append(f"{run.steps} steps")


def check_trial(name: str, checks: Any) -> None:
    """Run what `vllm-kvpolicy verify --feature NAME` runs."""
    trial, config = TRIALS[name], KVPolicyConfig("ams-tova", 128, 64)
    started = time.monotonic()
    for check in trial_checks(trial, trial.gpu_dtypes, config, print):
        seconds = time.monotonic() - started
        checks.add(check.name, check.result == PASSED, seconds, check.figures)
        started = time.monotonic()
