"""Whether the host waits for the GPU while requests decode.

vLLM reads sampled tokens through an event of its own, which is no synchronising call
for PyTorch. Stock is watched first: calls of its own that synchronise are known then,
and only others count. Where stock has none, the policy runs with
`torch.cuda.set_sync_debug_mode("error")`, which raises at the first.
"""

import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks.gpu.check.engines import on_gpu, options_of, served_names
from benchmarks.gpu.check.where import Where
from benchmarks.gpu.engine import settle
from support.engine.helpers import Engine, make_prompt

POLICY = {"budget": 128, "interval": 64, "events_per_step": 64}
DYNAMIC = {"hard_mode": "dynamic"}
MESSAGE = "called a synchronizing CUDA operation"
PACKAGE = "vllm_kvpolicy"
REQUESTS, PROMPT_TOKENS, SETTLED_TOKENS, STEPS = 12, 100, 8, 200
Site = str


def check_on_gpu(checks: Any) -> None:
    """Watch stock, then policies, on vLLM's default attention backend."""
    where, ragged = on_gpu("FLASH_ATTN"), served_names(ragged=True)
    check_syncs(checks, where, ragged, torch.cuda.set_sync_debug_mode)


def check_syncs(
    checks: Any, where: Where, ragged: Sequence[str], set_mode: Callable[[str], None]
) -> None:
    """Check that policies add no synchronising call to the steps of decoding.

    Args:
        where: what engines run on, and policies of heads of equal length.
        ragged: policies of heads of their own lengths.
        set_mode: torch.cuda.set_sync_debug_mode, or what stands in for it.
    """
    known: Counter[Site] = Counter()
    with checks.case("stock") as notes, where.engine() as engine:
        with_events, without = watch(engine, [None], set_mode)
        assert not with_events
        known = without
        notes.append(listed(known))
    options = options_of(where.policies)
    check_policy(checks, where, set_mode, known, where.policies, options)
    options = {**options_of(ragged), **DYNAMIC}
    check_policy(checks, where, set_mode, known, ragged, options, ", own lengths")


def check_policy(
    checks: Any,
    where: Where,
    set_mode: Callable[[str], None],
    known: Counter[Site],
    names: Sequence[str],
    options: dict[str, Any],
    tier: str = "",
) -> None:
    """Watch the policies of one server; `known` are stock's own calls."""
    asked = [{"kv_policy": name} for name in names]
    served = {"policy": names[0], "allow": list(names[1:]), "policy_config": options}
    with where.engine({**POLICY, **served, "prefill_interval": 1024}) as engine:
        with checks.case(f"steps without and with events{tier}") as notes:
            with_events, without = watch(engine, asked, set_mode)
            events = engine.counters()["events"]
            notes.append(f"{events:.0f} events in {STEPS} steps")
            for label, found in (("with", with_events), ("without", without)):
                more = found - known if label == "without" else unknown(found, known)
                assert not more, f"in steps {label} events: {listed(more)}"
            assert events >= len(asked)
        with checks.case(f'mode "error"{tier}') as notes:
            if known:
                notes.append(f"NOT RUN: stock itself synchronises, {listed(known)}")
            else:
                before = engine.counters()["events"]
                decode(engine, asked, lambda step: raising(set_mode))
                notes.append(f"{engine.counters()['events'] - before:.0f} events")
                assert engine.counters()["events"] > before


def unknown(found: Counter[Site], known: Counter[Site]) -> Counter[Site]:
    """Return the calls that stock does not have at all."""
    return Counter({site: count for site, count in found.items() if site not in known})


def watch(
    engine: Engine, asked: list[Any], set_mode: Callable[[str], None]
) -> tuple[Counter[Site], Counter[Site]]:
    """Return synchronising calls of steps with events, and of the others."""
    found: tuple[Counter[Site], Counter[Site]] = (Counter(), Counter())
    has_policy = asked != [None]

    @contextmanager
    def watched(step: int) -> Iterator[None]:
        before = engine.counters()["events"] if has_policy else 0
        with recorded(set_mode) as sites:
            yield
        after = engine.counters()["events"] if has_policy else 0
        found[0 if after > before else 1].update(sites)

    decode(engine, asked, watched)
    return found


def decode(engine: Engine, asked: list[Any], around: Callable[[int], Any]) -> None:
    """Let requests decode; each step of STEPS runs inside `around(step)`."""
    from vllm import SamplingParams, TokensPrompt

    llm_engine = engine.llm.llm_engine
    counts: dict[str, int] = {}
    for number in range(max(REQUESTS, len(asked))):
        params = SamplingParams(
            temperature=0,
            max_tokens=STEPS + 4 * SETTLED_TOKENS,
            ignore_eos=True,
            detokenize=False,
            extra_args=asked[number % len(asked)],
        )
        prompt = TokensPrompt(prompt_token_ids=make_prompt(number, PROMPT_TOKENS))
        counts[f"r{number}"] = 0
        llm_engine.add_request(f"r{number}", prompt, params)

    def step() -> None:
        for output in llm_engine.step():
            counts[output.request_id] = len(output.outputs[0].token_ids)

    while min(counts.values()) < SETTLED_TOKENS:
        step()
    for number in range(STEPS):
        with around(number):
            step()
    assert min(counts.values()) >= STEPS, "requests did not decode in every step"
    llm_engine.abort_request(list(counts))
    settle(engine)


@contextmanager
def recorded(set_mode: Callable[[str], None]) -> Iterator[Counter[Site]]:
    """Yield a counter that gets every synchronising call made inside."""
    sites: Counter[Site] = Counter()

    def note(message: Any, *rest: Any, **more: Any) -> None:
        if MESSAGE in str(message):
            sites[site_of(traceback.extract_stack(sys._getframe(1)))] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        set_mode("warn")
        try:
            yield sites
        finally:
            set_mode("default")


@contextmanager
def raising(set_mode: Callable[[str], None]) -> Iterator[None]:
    """Let every synchronising call raise."""
    set_mode("error")
    try:
        yield
    finally:
        set_mode("default")


def site_of(stack: traceback.StackSummary) -> Site:
    """Return the place to blame: the innermost line of this package, else of vLLM.

    Args:
        stack: of the call, outermost first.
    """
    for part in (f"/{PACKAGE}/", "/vllm/"):
        lines = [frame for frame in stack if part in frame.filename]
        if lines:
            name = lines[-1].filename.rpartition(part)[2]
            return f"{part.strip('/')}/{name}:{lines[-1].lineno}"
    frames = [frame for frame in stack if frame.filename != warnings.__file__]
    return f"{frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno}"


def listed(sites: Counter[Site]) -> str:
    """Return calls with how often they were made."""
    return ", ".join(f"{site} x{count}" for site, count in sites.items()) or "none"
