"""Policies over an FP8 KV cache, against stock vLLM with one and against the oracles.

In float32, so that nothing but the cache rounds. Stock vLLM on an AMX machine computes
FP8 attention in another order in bfloat16, which is not compared here.
"""

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from reasoner.problems import generate
from support.calibration_files import options_for
from support.cpu import needs_float8
from support.engine.float8_oracle import (
    STORED,
    Float8Decoder,
    run_and_see,
    scaled_cache,
)
from support.engine.helpers import Engine, Job, Run, config_of, make_jobs, make_prompt
from support.engine.oracle_plumbing import check_plumbing
from support.engine.oracle_replay import check_replay
from support.engine.oracle_selection import Report, check_selection
from support.engine.reference_decoder import ReferenceDecoder
from support.sweeps import covering, evictions
from vllm_kvpolicy.config_keys import ALWAYS, PRESSURE
from vllm_kvpolicy.policies.names import parse

pytestmark = needs_float8
VALUES = {"budget": 128, "interval": 40, "prefill_interval": 256}
ALL = covering(evictions())
STRAIN = {"max_num_batched_tokens": 96, "num_blocks": 24, "max_model_len": 512}
STRAIN |= {"foresees": False}  # requests preempt each other
MOVERS = ("identity", "holes ragged")
SCALES = ((0.5, 2.0), (0.25, 0.5))  # of keys and values, by layer: exact in any kernel


def configured(policy: str, **values: object) -> dict[str, object]:
    """Return the plain form of a policy, `NAME ragged` with a list per head."""
    name, _, ragged = policy.partition(" ")
    options = {"policy_config": {"ragged": True}} if ragged else {}
    return {"policy": name, **VALUES, **options, **values}


def check_storage(engine: Engine, kind: str) -> None:
    """The cache holds bytes, and the policy's views read them as FP8."""
    pool, caches = engine.runtime.compactor.pool, engine.worker.model_runner.kv_caches
    assert {cache.dtype for cache in caches} == {torch.uint8}
    assert {view.dtype for view in pool.keys + pool.values} == {STORED[kind]}
    starts = {cache.untyped_storage().data_ptr() for cache in caches}
    assert {view.untyped_storage().data_ptr() for view in pool.keys} == starts


def jobs_under_strain() -> list[Job]:
    return make_jobs((40, 150, 300), 130, seed=5)


@pytest.fixture(scope="module")
def stock(tiny_model: Path):
    """Runs of stock vLLM, each made once."""

    @cache
    def run(kind: str) -> Run:
        with Engine(tiny_model, None, kv_cache_dtype=kind, **STRAIN) as engine:
            return engine.run(jobs_under_strain())

    return run


@pytest.mark.parametrize("policy", MOVERS)
@pytest.mark.parametrize("kind", STORED)
def test_moving_tokens_gives_stocks_tokens(
    tiny_model: Path, stock, kind: str, policy: str
) -> None:
    """Under preemption, with prompts in chunks, on pages of any head and layer."""
    values = configured(policy)
    with Engine(tiny_model, values, kv_cache_dtype=kind, **STRAIN) as engine:
        check_storage(engine, kind)
        run = engine.run(jobs_under_strain())
        counters = engine.counters()
        assert engine.num_free == engine.num_usable
    assert run.tokens == stock(kind).tokens
    assert counters["events"] >= 8 and counters["tokens_dropped"] == 0
    assert run.preemptions > 0


def test_rounding_changes_answers(tiny_model: Path, stock) -> None:
    """Were the flag without effect, the test above would prove nothing."""
    with Engine(tiny_model, None, **STRAIN) as engine:
        plain = engine.run(jobs_under_strain()).tokens
    found = [stock(kind).tokens for kind in STORED]
    assert plain not in found and found[0] != found[1]


NEVER_BINDS = ({"budget": 512, "interval": 64}, {})
NEVER_CALLED = ({"events": PRESSURE}, {"num_blocks": 60, "foresees": True})


@pytest.mark.parametrize(
    ("policy", "values", "changes"),
    [("ams-tova", *NEVER_BINDS), ("adakv-snapkv", *NEVER_CALLED)],
)
def test_what_never_cuts_is_stock_fp8(
    tiny_model: Path, stock, policy: str, values: dict, changes: dict
) -> None:
    """A budget that never binds, and a pool with room in which no event is called."""
    values, changes = configured(policy, **values), {**STRAIN, **changes}
    with Engine(tiny_model, values, kv_cache_dtype="fp8", **changes) as engine:
        check_storage(engine, "fp8")
        run = engine.run(jobs_under_strain())
        assert engine.counters()["events"] == 0
    assert run.tokens == stock("fp8").tokens


def test_the_same_bytes_hold_four_times_the_tokens(tiny_model: Path) -> None:
    """Of a float32 model; tables of policies take their part."""
    found = {}
    for kind in ("auto", "fp8"):
        changes = {"kv_cache_memory_bytes": 2 * 2**20, "num_gpu_blocks_override": None}
        changes |= {"kv_cache_dtype": kind, "max_model_len": 512}
        with Engine(tiny_model, configured("streaming"), **changes) as engine:
            found[kind] = engine.num_usable + 1
            engine.run(make_jobs((150, 300), 150, seed=3))
            assert engine.counters()["tokens_dropped"] > 0
            assert engine.num_free == engine.num_usable
    assert 3.9 * found["auto"] <= found["fp8"] <= 4 * found["auto"] + 3


# -- oracles ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "kind", "events", "num_blocks"),
    [
        ("snapkv", "fp8", ALWAYS, 400),
        ("ams-snapkv", "fp8_e5m2", ALWAYS, 400),
        ("tova", "fp8", PRESSURE, 20),
    ],
)
def test_decisions_and_answers_are_those_of_the_references(
    tiny_model: Path,
    tmp_path: Path,
    policy: str,
    kind: str,
    events: str,
    num_blocks: int,
) -> None:
    """The selection oracle shares no code with the policies but `ams.select`."""
    values = {"policy": policy, **VALUES, "interval": 64, "spread_events": False}
    values["events"] = events
    jobs = make_jobs((41, 300, 180), 153, prompt_logprobs=True)
    changes = {"num_blocks": num_blocks, "max_model_len": 512}
    with Engine(tiny_model, values, tmp_path, kv_cache_dtype=kind, **changes) as engine:
        check_storage(engine, kind)
        run, seen = run_and_see(engine, jobs, ReferenceDecoder(tiny_model))
    report, config = Report(), config_of(values)
    for name, result in run.results.items():
        decoder = Float8Decoder(tiny_model, STORED[kind], seen[name])
        check_replay(decoder, result)
        check_selection(decoder, result, config, 32, report)
    report.check()
    assert report.decisions >= 20


@pytest.fixture(scope="module")
def served(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory):
    """Every policy of the package on one server; keys and values have scales."""
    trace = tmp_path_factory.mktemp("float8")
    options = {"expected_window": 48, "snapmax_window": 48, "allow": ALL}
    for scorer in ("triattention", "qfilter"):
        options |= options_for(scorer, trace, 2, 2, 2, 32)
    values = {"policy": ALL[0], **VALUES, "recent": 40, "sinks": 5}
    values |= {"interval": 100, "policy_config": options}
    jobs = [
        Job(
            name,
            make_prompt(7000 + number, (90, 180, 300)[number % 3]),
            275 if parse(name).protect_prompt else 175,  # a budget behind the prompt
            extra_args={"kv_policy": name},
            prompt_logprobs=True,
        )
        for number, name in enumerate(ALL)
    ]
    changes = {"max_num_batched_tokens": 128, "num_blocks": 1500, "max_model_len": 832}
    changes["kv_cache_dtype"] = "fp8"
    with scaled_cache(SCALES), Engine(tiny_model, values, trace, **changes) as engine:
        check_storage(engine, "fp8")
        float8 = engine.runtime.compactor.pool.float8
        assert tuple(map(tuple, float8.scales.values())) == SCALES
        run, seen = run_and_see(engine, jobs, ReferenceDecoder(tiny_model))
    return run, seen, config_of(values)


def decoder_of(served, model: Path, name: str) -> Float8Decoder:
    return Float8Decoder(model, STORED["fp8"], served[1][name], SCALES)


@pytest.mark.parametrize("name", ALL)
def test_answers_follow_from_the_survivors(served, tiny_model: Path, name: str) -> None:
    result = served[0].results[name]
    assert result.events
    check_replay(decoder_of(served, tiny_model, name), result)


@pytest.mark.parametrize("name", ALL)
def test_selection_is_the_policys(served, tiny_model: Path, name: str) -> None:
    run, _, config = served
    result = run.results[name]
    config = config.with_request(result.job.extra_args, 32)
    assert config is not None
    if config.protects_prompt:
        prompt = len(result.job.prompt)
        config = replace(config, budget_tokens=config.budget_tokens + prompt)
    decoder, report = decoder_of(served, tiny_model, name), Report()
    check_plumbing(decoder, result, config, config.resolved().options, 32, report)
    report.check()
    assert report.decisions > 0


# -- beside a cache of whole numbers ---------------------------------------------------

PACKAGED_MODEL = Path(__file__).parents[2] / "reasoner" / "checkpoint"
NEARLY = ("tova", "snapkv", "ams-tova", "expected", "adakv-snapkv")
AGREEMENT = 0.97


def keep_lists(kind: str, folder: Path) -> dict[str, np.ndarray]:
    """Return by policy what the first event of a prompt keeps, [L, H, positions].

    The prompt is a puzzle with its worked solution; the model is in bfloat16.
    """
    puzzle = generate("path", 90, 0)
    text = f"<bos><user>{puzzle.prompt}<assistant><think>{puzzle.trace}"
    coder = Tokenizer.from_file(str(PACKAGED_MODEL / "tokenizer.json"))
    prompt = coder.encode(text, add_special_tokens=False).ids[:400]
    values = {**VALUES, "budget": 192, "interval": 128, "prefill_interval": 128}
    values |= {"policy": NEARLY[0], "policy_config": {"allow": list(NEARLY)}}
    jobs = [Job(n, prompt, 1, extra_args={"kv_policy": n}) for n in NEARLY]
    changes = {"dtype": "bfloat16", "kv_cache_dtype": kind, "max_model_len": 1024}
    found = {}
    with Engine(PACKAGED_MODEL, values, folder / kind, **changes) as engine:
        storage = {cache.dtype for cache in engine.worker.model_runner.kv_caches}
        assert storage == {torch.uint8 if kind == "fp8" else torch.bfloat16}
        for name, result in engine.run(jobs).results.items():
            row = result.events[0].selected
            kept = np.zeros((*row.shape[:2], len(prompt) + 1), dtype=bool)
            np.put_along_axis(kept, row, True, axis=-1)  # -1: the last column
            found[name] = kept[..., :-1]
    return found


def test_keep_lists_are_nearly_those_of_a_whole_cache(tmp_path: Path) -> None:
    """Rounding reaches the scores, and by the layers before, the queries."""
    whole, rounded = (keep_lists(kind, tmp_path) for kind in ("auto", "fp8"))
    for name in NEARLY:
        both = (whole[name] & rounded[name]).sum()
        share = 2 * both / (whole[name].sum() + rounded[name].sum())
        print(f"{name}: {share:.4f} of what is kept is the same")
        assert share >= AGREEMENT
        assert share < 1  # or one of them was not over an FP8 cache
