"""Moving tokens is free of error: `identity` and `holes` give stock vLLM's tokens.

Beside sliding windows, states and learned sinks, and in an FP8 cache, too. So does what
never cuts: a budget that never binds, and a pool with room in which no event is called.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import pytest
from vllm.v1.attention.backends import cpu_attn

from support import sweeps
from support.cpu import needs_float8
from support.engine.helpers import POLICIES, Job, Run, make_jobs, serve
from support.made_hybrids import FAMILIES, LATENTS, SETTINGS
from vllm_kvpolicy.config_keys import PRESSURE

# With ragged tables pages change heads and layers, too.
RAGGED = " ragged"
MOVERS = ("identity", "holes", "identity ragged", "holes ragged")
VALUES = {"budget": 128, "interval": 40, "prefill_interval": 256}


def named(policy: str) -> dict[str, object]:
    """Return the configuration of a policy as these tests name it."""
    options = {"ragged": True} if policy.endswith(RAGGED) else {}
    if policy == "ams-expected":
        options = {"expected_window": 40}
    return {"policy": policy.removesuffix(RAGGED), "policy_config": options, **VALUES}


plain_jobs = partial(make_jobs, (40, 90, 150, 300, 410), 130, seed=5)


def jobs_with_aborts() -> list[Job]:
    """Twelve requests that come one after another; every third is aborted."""
    jobs = make_jobs([30 + 37 * i % 290 for i in range(12)], 110, seed=6)
    return [
        replace(job, arrives=8 * i, aborted=(35 + 30 * i) % 100 if i % 3 == 1 else None)
        for i, job in enumerate(jobs)
    ]


@dataclass(frozen=True)
class Case:
    """Requests on an engine.

    Args:
        jobs: makes them.
        engine: arguments of `Engine`.
        least: events that they have at least.
        model: name of its folder, see `folders`.
        preempts: whether all engines run short of superblocks; None for whatever.
        values: of the policy, in place of VALUES.
    """

    jobs: Callable[[], list[Job]]
    engine: dict[str, Any] = field(default_factory=dict)
    least: int = 15
    model: str = "tiny_model"
    preempts: bool | None = False
    values: dict[str, Any] = field(default_factory=dict)


CHUNKS = {"max_num_batched_tokens": 96}
SCARCE = {"num_blocks": 36, "max_model_len": 640}
SHORT: dict[str, Any] = {**CHUNKS, "max_model_len": 896, "num_blocks": 60}
STRAIN: dict[str, Any] = {**CHUNKS, "max_model_len": 512, "num_blocks": 24}
# Requests preempt each other.
SHORT["foresees"] = STRAIN["foresees"] = False
by_windows = partial(make_jobs, (40, 150, 300, 600), 200, seed=5)
in_bytes = partial(make_jobs, (40, 150, 300), 130, seed=5)
OF_TINY = {
    "plain": Case(plain_jobs),
    "preemption": Case(plain_jobs, {**SCARCE, **CHUNKS}, preempts=True),
    "aborts": Case(jobs_with_aborts, SCARCE, preempts=None),
}
OF_GEMMA = {
    "gemma3": Case(by_windows, CHUNKS, 20, "gemma3"),
    "gemma3, preemption": Case(by_windows, SHORT, 20, "gemma3", True),
}
OF_STATES = {
    "lfm2": Case(by_windows, CHUNKS | SETTINGS["lfm2"], 20, "lfm2"),
    "lfm2, preemption": Case(by_windows, SHORT | SETTINGS["lfm2"], 20, "lfm2", True),
}
# Superblocks of some are larger, so that a state fits, than events were made for.
LARGE = {"budget": 160, "prefill_interval": 384}
OF_FAMILIES = {
    name: Case(by_windows, CHUNKS | SETTINGS.get(name, {}), 15, name, values=LARGE)
    for name in FAMILIES
}
OF_BYTES = {
    kind: Case(in_bytes, {**STRAIN, "kv_cache_dtype": kind}, 8, preempts=True)
    for kind in ("fp8", "fp8_e5m2")
}
FP8 = {**CHUNKS, "kv_cache_dtype": "fp8"}
OF_BOTH = {
    f"fp8 of {name}": Case(in_bytes, FP8, 6, name, values=LARGE)
    for name in ("gemma3", "gemma4_31b")
}
ROOMY = {**STRAIN, "kv_cache_dtype": "fp8", "num_blocks": 60, "foresees": True}
# Superblocks of latent vectors have 16 tokens on a CPU.
FEW = {"num_blocks": 72, "max_model_len": 640, **SETTINGS["deepseek_v3"]}
ABORTED = "deepseek_v3, aborts"
MORE = {
    "full attention first": Case(by_windows, CHUNKS, 10, "reversed_gemma3"),
    "gpt-oss": Case(partial(make_jobs, (40, 300), 150, seed=5), CHUNKS, 5, "gpt_oss"),
    "fp8 of lfm2": Case(in_bytes, FP8 | SETTINGS["lfm2"], 8, "lfm2"),
    ABORTED: Case(jobs_with_aborts, FEW, 15, "deepseek_v3", None, values=LARGE),
    "no fp8": Case(in_bytes, STRAIN, 0),
    "fp8, roomy": Case(in_bytes, ROOMY),
}
CASES = {**OF_TINY, **OF_GEMMA, **OF_STATES, **OF_FAMILIES, **OF_BYTES, **OF_BOTH}
CASES |= MORE
# vLLM has its gated delta net in bfloat16 alone, where stock beside itself, in chunks
# of other lengths, has other tokens, too.
ROUNDED = ("qwen3_next",)
EXACT = [name for name in FAMILIES if name not in (*ROUNDED, *LATENTS)]


def marked(*values: Any) -> Any:
    """Return parameters of a test; an FP8 cache needs more of a CPU than others."""
    needs = any(str(value).startswith("fp8") for value in values)
    return pytest.param(*values, marks=needs_float8 if needs else ())


# test_sliding_replay.py has every family.
ALIKE, APART = MOVERS[0], MOVERS[3]
TWO = MOVERS if sweeps.every_name else (ALIKE, APART)
RUNS = sweeps.paired(MOVERS, OF_TINY)
OTHERS = [*sweeps.paired(TWO, OF_GEMMA), *sweeps.paired(TWO, OF_STATES)]
OTHERS += sweeps.paired(MOVERS, sweeps.some(EXACT))
OTHERS += [(ALIKE, "full attention first"), (ALIKE, "gpt-oss"), (ALIKE, "deepseek_v3")]
OTHERS += [("holes", "glm4_lite"), ("holes", ABORTED)]
OTHERS += [marked(*each) for each in sweeps.paired(TWO, OF_BOTH)]
OTHERS += [marked(*each) for each in sweeps.paired((ALIKE, APART), OF_BYTES)]
OTHERS += [marked("identity ragged", "fp8 of lfm2")]
Runs = Callable[..., Run]
# Layers and KV heads, where not two of both.
HEADS = {"falcon_h1": (3, 2), "gemma4_e2b": (2, 1), **dict.fromkeys(LATENTS, (3, 1))}


@pytest.fixture(scope="module", autouse=True)
def one_order_of_pages() -> Iterator[None]:
    """Have stock vLLM attend in bfloat16 with AVX-512, as policies do, also with AMX.

    AMX has another order of pages, and rounds otherwise.
    """
    original = cpu_attn._get_attn_isa
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            cpu_attn,
            "_get_attn_isa",
            lambda *given, **named: original(*given, **named).replace("amx", "vec"),
        )
        yield


@pytest.fixture(scope="module")
def runs(folders, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Return what runs a policy, None for stock vLLM, once in a case."""

    @cache
    def run(policy: str | None, name: str) -> Run:
        case = CASES[name]
        trace = tmp_path_factory.mktemp("trace") if policy else None
        model = folders(case.model)
        values = {**named(policy), **case.values} if policy else None
        return serve(model, values, case.jobs(), trace, **case.engine)

    return run


@pytest.mark.parametrize(("policy", "name"), [*RUNS, *OTHERS])
def test_tokens_are_those_of_stock(runs: Runs, policy: str, name: str) -> None:
    run, stock, case = runs(policy, name), runs(None, name), CASES[name]
    run.check_answers(stock)
    assert run.counters["events"] >= case.least
    run.check_moved(HEADS.get(CASES[name].model, (2, 2)))
    for each in (run, stock) if case.preempts is not None else ():
        assert (each.preemptions > 0) == case.preempts


@pytest.mark.parametrize("policy", [mover for mover, name in RUNS if name == "plain"])
def test_heads_are_shuffled_apart(runs: Runs, policy: str) -> None:
    """Different (layer, head) pairs hold the same tokens in different places."""
    for event in runs(policy, "plain").events:
        survivors = event.survivors.reshape(-1, event.survivors.shape[-1])
        assert all(sorted(row) == list(range(event.frontier)) for row in survivors)
        assert len({tuple(row) for row in survivors}) == len(survivors)


@needs_float8
def test_rounding_changes_answers(runs: Runs) -> None:
    """Were the flag without effect, the tests of FP8 caches would prove nothing."""
    found = [runs(None, name).tokens for name in ("no fp8", *OF_BYTES)]
    assert found[0] != found[1] != found[2] != found[0]


NEVER_BINDS = {"budget": 2048, "interval": 64}
NEVER_CALLED = {"events": PRESSURE}  # test_prefix_caching.py has all others
STOCK = [
    (policy, NEVER_BINDS, "plain")
    for policy in sweeps.some(("adakv-snapkv", *POLICIES))
]
STOCK += [
    ("epikv", {**NEVER_CALLED, "budget": 68}, "plain"),
    ("ams-expected", NEVER_BINDS, "gemma3"),
    ("ams-expected", NEVER_CALLED, "gemma3"),
    ("ams-tova", NEVER_BINDS, "gpt-oss"),
    ("adakv-snapkv", NEVER_BINDS, "lfm2"),
    ("ams-tova", NEVER_CALLED, "lfm2"),
    *(
        ("tova" if name in LATENTS else "adakv-snapkv", LARGE | mode, name)
        for name in (FAMILIES if sweeps.every_name else ROUNDED)
        for mode in (NEVER_BINDS, NEVER_CALLED)
    ),
    marked("ams-tova", NEVER_BINDS, "fp8"),
    marked("adakv-snapkv", NEVER_CALLED, "fp8, roomy"),
]


@pytest.mark.parametrize(("policy", "values", "name"), STOCK)
def test_what_never_cuts_is_stock(
    folders, runs: Runs, policy: str, values: dict[str, object], name: str
) -> None:
    case, stock = CASES[name], runs(None, name)
    model = folders(case.model)
    run = serve(model, {**named(policy), **values}, case.jobs(), **case.engine)
    run.check_answers(stock)
    assert not run.counters["events"] and run.steps == stock.steps
