"""Engines on the GPU with a policy, beside stock vLLM: tokens, memory, graphs."""

import json
import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.gpu.check.compare import Agreement, assert_alike, assert_same, compare
from benchmarks.gpu.check.where import (
    GPU,
    QUICK,
    Graphs,
    Held,
    Jobs,
    Where,
    assert_given_back,
    storm,
)
from benchmarks.gpu.models import drawn_weights, write_model
from reasoner.problems import FAMILIES, generate
from reasoner.tokenizer import chat_prompt, encode
from support.attention.oracles import missing
from support.engine.helpers import Job, Run, make_jobs, make_prompt
from support.made_gates import make_gates
from vllm_kvpolicy.policies.names import names, parse

REASONER = Path(__file__).resolve().parents[3] / "reasoner" / "checkpoint"
MOVER = {
    "budget": 128,
    "interval": 40,
    # Above all prompts, and no event waits: steps are those of stock.
    "prefill_interval": 1024,
    "events_per_step": 64,
}
BASE = {
    "budget": 150,
    "interval": 130,
    "prefill_interval": 256,
    "recent": 40,
    "sinks": 5,
}
OPTIONS = {"expected_window": 48, "snapmax_window": 48}
RAGGED = "identity, ragged"
SOME = ("ams-tova", "snapkv", "keydiff", "streaming")
ADMITTED = ("wgkv", "wgkv+snapkv", "wgkv+ams-tova")
INFINITE_BUDGET = 2048


def served_names(ragged: bool) -> list[str]:
    """Return the policies of a tier that need no file.

    Args:
        ragged: of heads of their own lengths, else of heads of equal length.
    """
    found = []
    for name in names():
        info = parse(name)
        needs_file = name.rpartition("-")[2] in ("triattention", "qfilter")
        if not (info.is_test or needs_file) and is_ragged(name) == ragged:
            found.append(name)
    return found


def options_of(policies: Sequence[str]) -> dict[str, Any]:
    """Return those of `OPTIONS` that some of the policies read."""
    read = {key for name in policies for key in parse(name).options}
    return {key: value for key, value in OPTIONS.items() if key in read}


def is_ragged(name: str) -> bool:
    """Return whether heads hold different numbers of tokens under a policy."""
    return parse(name).is_ragged({})


def problems(count: int) -> Jobs:
    """Return requests with problems that the packaged model was trained on."""
    families = sorted(FAMILIES)
    jobs = []
    for number in range(count):
        problem = generate(families[number % len(families)], 6 + 4 * number, number)
        prompt = encode(chat_prompt(problem.prompt))
        jobs.append(Job(problem.family + str(number), prompt, 300))
    return jobs


def one_of_each(
    policies: Sequence[str], tokens: int, prompt_logprobs: bool = False
) -> Jobs:
    """Return a request of each policy, with prompts of several lengths."""
    return [
        Job(
            name,
            make_prompt(7000 + number, (37, 180, 300, 430)[number % 4]),
            tokens,
            extra_args={"kv_policy": name},
            prompt_logprobs=prompt_logprobs,
        )
        for number, name in enumerate(policies)
    ]


def on_gpu(backend: str) -> Where:
    """Return the packaged model on the GPU, with one attention backend."""
    # In float32, which FlashAttention lacks, there is hardly any rounding to allow for.
    is_exact = backend == "TRITON_ATTN"
    dtype = {"dtype": "float32"} if is_exact else {}
    return Where(
        model=REASONER,
        settings={**GPU, **QUICK, **dtype, "attention_backend": backend},
        num_blocks=4000,
        tight_blocks=110,
        jobs=problems(16),
        backend=backend,
        policies=served_names(ragged=False),
        other_backend="" if is_exact else "TRITON_ATTN",
    )


def check_backend(backend: str, checks: Any) -> None:
    """Run all checks of the packaged model on one attention backend."""
    where = on_gpu(backend)
    stock = check_stock(checks, where)
    check_movers(checks, where, stock, ("identity", "holes", RAGGED))
    check_infinite(checks, where, stock)
    for ragged in (False, True):
        check_policies(checks, replace(where, policies=served_names(ragged)))
    with tempfile.TemporaryDirectory() as folder:
        check_policies(checks, replace(where, policies=ADMITTED), Path(folder))


def check_flashinfer(checks: Any) -> None:
    """Run engines on an extra, under policies whose heads hold equally much."""
    if reason := missing("flashinfer"):
        with checks.case("engines") as notes:
            notes.append(f"NOT RUN: {reason}")
        return
    where = on_gpu("FLASHINFER")
    stock = check_stock(checks, where)
    check_movers(checks, where, stock, ("identity", "holes"))
    check_infinite(checks, where, stock)
    check_policies(checks, where)


def check_runner(checks: Any) -> None:
    """Run vLLM's first model runner, which the group's environment asks for."""
    for backend in ("TRITON_ATTN", "FLASH_ATTN"):
        checks.label = f"{backend}, "
        where = on_gpu(backend)
        changes = {"max_num_seqs": 16, "max_model_len": 2048}
        settings = {**where.settings, **changes}
        where = replace(where, settings=settings, tight_blocks=0, backend="")
        stock = check_stock(checks, where)
        check_movers(checks, where, stock, ("identity", "holes", RAGGED))
        check_infinite(checks, where, stock)
        for policies in (SOME, ("adakv-snapkv", "hard-snapkv")):
            check_policies(checks, replace(where, policies=policies))


def check_shape(shape: str, checks: Any) -> None:
    """Run a few checks of a model of 8 billion random parameters, all as by default.

    Qwen's starts the quick way, Llama's as vLLM starts if it is told nothing: compiled,
    with graphs of whole decode steps and of pieces of the others.
    """
    with tempfile.TemporaryDirectory() as folder:
        how = QUICK if shape.startswith("qwen") else {}
        where = Where(
            model=write_model(shape, Path(folder)),
            settings={
                **GPU,
                **how,
                "max_num_seqs": 16,
                "kv_cache_memory_bytes": 2**32,
                "load_format": drawn_weights(),
                "skip_tokenizer_init": True,
            },
            num_blocks=1600,
            tight_blocks=0,
            jobs=make_jobs([300 + 40 * n for n in range(16)], 96),
            backend="FLASH_ATTN",
            policies=SOME,
        )
        stock = check_stock(checks, where)
        check_movers(checks, where, stock, ("identity", RAGGED) if how else ("holes",))
        check_policies(checks, where)


@dataclass(frozen=True)
class Stock:
    """What stock vLLM did.

    Args:
        noises: each request alone beside that, and all of them on another backend.
        tight: all requests together in a pool that is too small, None if not tried.
    """

    run: Run
    noises: Sequence[Agreement]
    tight: Run | None


def check_stock(checks: Any, where: Where) -> Stock:
    """Run stock vLLM; what it does is what others are compared with."""
    with checks.case("stock beside itself, alone") as notes:
        with where.engine() as engine:
            run = engine.run(where.jobs)
            alone = Run({}, 0, 0)
            for job in where.jobs[::3]:
                alone.results.update(engine.run([job]).results)
            some = Run({name: run.results[name] for name in alone.results}, 0, 0)
            noises = [compare(alone, some)]
            blocks = where.tight_blocks
            tight = storm(engine, where.jobs, blocks) if blocks else None
        if where.other_backend:
            changes = {**where.settings, "attention_backend": where.other_backend}
            with replace(where, settings=changes).engine() as engine:
                noises.append(compare(engine.run(where.jobs), run))
        notes.append("; on another backend: ".join(map(str, noises)))
        return Stock(run, noises, tight)
    raise RuntimeError("stock vLLM does not run: nothing to compare with")


def check_movers(
    checks: Any, where: Where, stock: Stock, movers: Sequence[str]
) -> None:
    """Tokens change their places and nobody notices, under preemption too.

    Under `identity` a request keeps its blocks, so that vLLM's own tables would do.
    Under `holes` it gives half of them back: only our tables name the right ones. Where
    it is RAGGED pages change heads and layers, too, and every head reads a table of its
    own.
    """
    for name in movers:
        policy = {"policy": name.partition(",")[0], **MOVER}
        if name == RAGGED:
            policy |= {"policy_config": {"ragged": True}}
        with checks.case(name) as notes, where.engine(policy) as engine:
            graphs = Graphs(engine, where.backend)
            run = engine.run(where.jobs)
            found = compare(run, stock.run)
            counters = engine.counters()
            notes += [str(found), f"{counters['events']:.0f} events"]
            assert_alike(found, stock.noises, where.dtype)
            assert counters["events"] >= len(where.jobs)
            assert counters["tokens_dropped"] == 0
            assert run.steps == stock.run.steps, (run.steps, stock.run.steps)
            assert_given_back(engine)
            notes += graphs.proof(run.steps)
            if stock.tight is not None and name != RAGGED:
                tight = storm(engine, where.jobs, where.tight_blocks)
                found = compare(tight, stock.run)
                notes.append(f"storm of {tight.preemptions} preemptions: {found}")
                noises = [*stock.noises, compare(stock.tight, stock.run)]
                assert_alike(found, noises, where.dtype)
                assert_given_back(engine)


def check_infinite(checks: Any, where: Where, stock: Stock) -> None:
    """Stock's tokens, bit for bit, with room for all.

    With a budget that is never reached, or where events are called for when the pool
    runs short.
    """
    mover = {"policy": "ams-tova", "interval": 64, "prefill_interval": 1024}
    for name, changes in {
        "infinite budget": {"budget": INFINITE_BUDGET},
        "room, called events": {"budget": 96, "events": "pressure"},
    }.items():
        with checks.case(name) as notes, where.engine(mover | changes) as engine:
            graphs = Graphs(engine, where.backend)
            run = engine.run(where.jobs)
            found = compare(run, stock.run)
            notes.append(str(found))
            assert_same(found)
            assert engine.counters()["events"] == 0
            assert run.steps == stock.run.steps, (run.steps, stock.run.steps)
            notes += graphs.proof(run.steps, with_events=False)


def check_policies(checks: Any, where: Where, folder: Path | None = None) -> None:
    """Real policies run side by side, give blocks back, and survive preemptions."""
    jobs = one_of_each(where.policies, where.policy_tokens)
    first, *others = where.policies
    options = options_of(where.policies)
    if folder is not None:
        options = options | gates_of(where.model, folder)
    policy = {"policy": first, "allow": others, "policy_config": options, **BASE}
    label = ", ".join(where.policies)
    if len(jobs) > 4:
        kind = "own lengths" if is_ragged(first) else "equal lengths"
        label = f"{len(jobs)} policies, heads of {kind}"
    with checks.case(label) as notes, where.engine(policy) as engine:
        graphs, held = Graphs(engine, where.backend), Held()
        run = engine.run(jobs, held)
        assert_whole(run, jobs)
        assert_given_back(engine)
        counters = engine.counters()
        notes.append(
            f"{counters['events']:.0f} events, "
            f"{counters['blocks_returned']:.0f} blocks back"
        )
        assert counters["events"] >= len(jobs)
        assert min(counters["blocks_returned"], counters["tokens_dropped"]) > 0
        notes += graphs.proof(run.steps)
        if where.tight_blocks:
            tight = storm(engine, jobs, held.tight())
            assert_whole(tight, jobs)
            assert_given_back(engine)
            notes.append(f"{tight.preemptions} preemptions")


def gates_of(model: Path, folder: Path) -> dict[str, str]:
    """Write gates of random weights for a model; return the option that names them."""
    config = json.loads((model / "config.json").read_text())
    path = folder / "gates.safetensors"
    shape = (config["num_hidden_layers"], config["num_key_value_heads"])
    theta = config["rope_parameters"]["rope_theta"]
    fields = {"window": BASE["recent"], "rope_theta": theta}
    fields["flavour"] = config["model_type"]
    make_gates(*shape, config["head_dim"], **fields).save(path)
    return {"wgkv_gates": str(path)}


def assert_whole(run: Run, jobs: Jobs) -> None:
    """Raise unless every request has all its tokens, with finite log-probabilities."""
    assert set(run.results) == {job.name for job in jobs}
    for job in jobs:
        result = run.results[job.name]
        assert len(result.tokens) == job.max_tokens, job.name
        steps = zip(result.tokens, result.logprobs, strict=True)
        values = [entry[t] for t, entry in steps]
        assert all(map(math.isfinite, values)), f"{job.name}: not finite"
