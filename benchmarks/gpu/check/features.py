"""Features that were never tried on a GPU, or not enough."""

import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.check.compare import assert_alike, assert_same, compare
from benchmarks.gpu.check.engines import (
    BASE,
    INFINITE_BUDGET,
    Stock,
    assert_whole,
    on_gpu,
    one_of_each,
)
from benchmarks.gpu.check.where import Jobs, Where, assert_given_back
from support.engine.helpers import Engine, Run
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


def check_identity(checks: Any, where: Where) -> None:
    """Answers are stock's where tokens move, and where a budget is never reached.

    Then policies drop tokens, and blocks come back.
    """
    jobs, backend, some = where.jobs, where.settings["attention_backend"], None
    with checks.case(f"{backend}, stock") as notes:
        with where.engine() as engine:
            run = noted(engine, jobs, notes)
            alone = Run({}, 0, 0)
            for job in jobs[::4]:
                alone.results.update(engine.run([job]).results)
        some = Run({name: run.results[name] for name in alone.results}, 0, 0)
        noises = [compare(alone, some)]
        if where.other_backend:
            changes = {**where.settings, "attention_backend": where.other_backend}
            with replace(where, settings=changes).engine() as engine:
                noises.append(compare(engine.run(jobs), run))
        stock = Stock(run, noises, None)
        notes.append("; on another backend: ".join(map(str, noises)))
    if not some:
        return
    mover = {"budget": 96, "interval": 40, "prefill_interval": 512}
    cases = {
        "infinite budget": {"policy": "ams-tova", "budget": INFINITE_BUDGET},
        "identity": {"policy": "identity", **mover},
        "holes": {"policy": "holes", **mover},
        "ams-tova": {"policy": "ams-tova", **mover},
        "identity, ragged": {
            "policy": "identity",
            "policy_config": {"ragged": True},
            **mover,
        },
        "adakv-snapkv": {"policy": "adakv-snapkv", **mover},
    }
    for name, policy in cases.items():
        with checks.case(f"{backend}, {name}") as notes:
            with where.engine(policy) as engine:
                run = noted(engine, jobs, notes)
                counters = engine.counters()
                assert_given_back(engine)
            notes.append(f"{counters['events']:.0f} events")
            if name == "infinite budget":
                assert_same(compare(run, stock.run))
            elif policy["policy"] in ("identity", "holes"):
                found = compare(run, stock.run)
                notes.append(str(found))
                assert_alike(found, stock.noises, where.dtype)
            else:
                assert_whole(run, jobs)
                assert counters["tokens_dropped"] > 0


def noted(engine: Engine, jobs: Jobs, notes: list[str]) -> Run:
    """Run requests; note the model runner."""
    notes.append(f"runner {2 if engine.worker.use_v2_model_runner else 1}")
    return engine.run(jobs)


def check_runner(checks: Any) -> None:
    """Try vLLM's first model runner."""
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    changes = {"max_num_seqs": 16, "max_model_len": 2048}
    for backend in ("TRITON_ATTN", "FLASH_ATTN"):
        where = on_gpu(backend)
        check_identity(checks, replace(where, settings={**where.settings, **changes}))


def check_trial(name: str, checks: Any) -> None:
    """Run what `vllm-kvpolicy verify --feature NAME` runs."""
    trial, config = TRIALS[name], KVPolicyConfig("ams-tova", 128, 64)
    started = time.monotonic()
    for check in trial_checks(trial, trial.gpu_dtypes, config, print):
        seconds = time.monotonic() - started
        checks.add(check.name, check.result == PASSED, seconds, check.figures)
        started = time.monotonic()
