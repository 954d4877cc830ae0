"""Makes the engines of a run: vLLM in this process' children, several policies each.

All requests of an engine name their policy and budget; the engine has the largest
budget. Prompts have an event at every multiple of the interval, keep the first and the
newest tokens only, and phases are off, so that all policies drop at the same places.
Parts that ask as users do have engines with the defaults of servers instead, and FULL
its own, without a policy, where the pool is too small.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.accuracy.servers import FULL, OWN_DTYPE, options_of, split
from benchmarks.provenance import usable_cores
from benchmarks.workload import block_bytes
from vllm_kvpolicy.config_keys import ALWAYS, DEFAULT_RECENT
from vllm_kvpolicy.policies.names import parse

BLOCK_SIZE = 32
BATCHED_TOKENS = 2048
FORCED = "benchmarks.language.forced:Forced"
"""What makes an engine decode tokens that are known, for its `logits_processors`."""
FORCED_KEY = "forced_tokens"
"""In a request's `extra_args`: those tokens."""
ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "OMP_NUM_THREADS": str(usable_cores()),
    "HF_HUB_OFFLINE": "1",
}

Tokens = Sequence[int]


@dataclass(frozen=True)
class Settings:
    """What all engines of a run have in common.

    Attributes:
        budgets: tokens per KV head.
        policy_config: options of policies; those that a policy does not have are left
            out.
        variants: name -> options that win over them.
        as_served: prefix caching is on, and events and protected prompts are those that
            servers have by default.
        events: at fixed positions, or when the pool runs short.
        pool_share: of the bytes that all requests at once need; None for room for all.
        trace: folder in which engines record what events keep, None for no record.
        kv_cache_dtype: of keys and values in the cache, as vLLM names it.
        recent: newest tokens that stay in any case.
    """

    model: Path
    dtype: str
    max_model_len: int
    at_once: int
    budgets: tuple[int, ...]
    intervals: tuple[int, ...]
    policy_config: Mapping[str, Any] = field(default_factory=dict)
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    as_served: bool = False
    events: str = ALWAYS
    pool_share: float | None = None
    trace: Path | None = None
    kv_cache_dtype: str = OWN_DTYPE
    recent: int = DEFAULT_RECENT

    def recorded(self) -> dict[str, Any]:
        """Return what an output file says about its engines."""
        own: dict[str, Any] = {"as_served": True} if self.as_served else {}
        if self.kv_cache_dtype != OWN_DTYPE:
            own["kv_cache_dtype"] = self.kv_cache_dtype
        if self.recent != DEFAULT_RECENT:
            own["recent"] = self.recent
        if self.pool_share is not None:
            own |= {"events": self.events, "pool_share": self.pool_share}
        return own | {
            "model": self.model.name,
            "dtype": self.dtype,
            "at_once": self.at_once,
            "policy_config": dict(self.policy_config),
            "variants": {name: dict(keys) for name, keys in self.variants.items()},
        }


@dataclass(frozen=True)
class Engine:
    """One engine to be made.

    Attributes:
        policies: names, all of one tier; any of them may be asked for, and FULL.
        variant: name of its own options, empty for none.
    """

    policies: tuple[str, ...]
    interval: int
    variant: str = ""

    def label_of(self, policy: str) -> str:
        """Return the name of a policy of this engine: `NAME` or `NAME:VARIANT`."""
        return f"{policy}:{self.variant}" if self.variant else policy


def engines_of(
    labels: Sequence[str], intervals: Sequence[int], is_alone: bool = False
) -> list[Engine]:
    """Return the engines of a run; the first of each interval also runs FULL.

    Args:
        labels: `NAME` or `NAME:VARIANT`; FULL need not be named.
        is_alone: FULL has an engine for itself, without a policy, where it is named.
    """
    kinds: dict[tuple[str, bool], list[str]] = {}
    for label in labels:
        if label != FULL:
            name, variant = split(label)
            kinds.setdefault((variant, parse(name).is_ragged({})), []).append(name)
    found = [
        Engine(tuple(names), interval, variant)
        for interval, ((variant, _), names) in product(intervals, kinds.items())
    ]
    if is_alone:
        full = intervals if FULL in labels else ()
        return [*(Engine((FULL,), interval) for interval in full), *found]
    first = {engine.interval: engine for engine in reversed(found)}
    return [
        Engine((FULL, *engine.policies), engine.interval, engine.variant)
        if engine is first[engine.interval]
        else engine
        for engine in found
    ]


class Asker:
    """Sends prompts to an engine."""

    def __init__(self, llm: Any, interval: int) -> None:
        self._llm, self.interval = llm, interval

    def ask(
        self,
        prompts: Sequence[Tokens],
        policy: str,
        budget: int,
        salts: Sequence[str] = (),
        forced: Sequence[Tokens] = (),
        **sampling: Any,
    ) -> list[Any]:
        """Return vLLM's output for each prompt, in order.

        Args:
            budget: tokens per KV head; FULL does not read it.
            salts: of each prompt; those of one salt share what is in the prefix cache.
            forced: of each prompt, the tokens to decode.
            **sampling: of vLLM's SamplingParams; decoding is greedy.
        """
        from vllm import SamplingParams, TokensPrompt

        keys: dict[str, Any] = {"kv_policy": "none"}
        if policy != FULL:
            keys = {"kv_policy": policy, "kv_budget": budget}
        params = [
            SamplingParams(
                temperature=0,
                extra_args=keys | {FORCED_KEY: list(answer)},
                max_tokens=len(answer),
                **sampling,
            )
            for answer in forced
        ] or SamplingParams(temperature=0, extra_args=keys, **sampling)
        asked = [TokensPrompt(prompt_token_ids=list(prompt)) for prompt in prompts]
        for prompt, salt in zip(asked if salts else (), salts, strict=True):
            prompt["cache_salt"] = salt
        return self._llm.generate(asked, params, use_tqdm=False)


@dataclass(frozen=True)
class Predicted:
    """What was predicted along a prompt, and from what.

    Attributes:
        entries: [tokens - 1], token id -> log p, nats. Entry i is of token i + 1, which
            the token at position i predicts.
        dropped: position of each event, and tokens per KV head that are no longer held
            behind it, mean over layers and heads.
    """

    entries: list[dict[int, float]]
    dropped: tuple[tuple[int, float], ...] = ()

    def held_share(self, first: int) -> float:
        """Return the KV tokens that entries from `first` on read, beside full KV's."""
        positions = np.arange(first, len(self.entries))
        if not positions.size:
            return 1.0
        events = np.array([(0, 0.0), *self.dropped])
        behind = np.searchsorted(events[:, 0], positions, side="right") - 1
        return float(1 - events[behind, 1].sum() / (positions + 1).sum())


SAID_AFTER = 4
"""Tokens of an answer within which the last event's count is heard of."""


def predictions(
    asker: Asker, prompts: Sequence[Tokens], policy: str, budget: int, top: int
) -> list[Predicted]:
    """Return what is predicted for each token of prompts but the first.

    Args:
        top: most probable tokens to name beside the prompt's own.
    """
    outputs = asker.ask(
        prompts,
        policy,
        budget,
        max_tokens=SAID_AFTER,
        ignore_eos=True,
        prompt_logprobs=top,
    )
    return [
        Predicted(_entries(output.prompt_logprobs, prompt), dropped_of(output))
        for output, prompt in zip(outputs, prompts, strict=True)
    ]


def dropped_of(output: Any) -> tuple[tuple[int, float], ...]:
    """Return the events that vLLM's output of a request tells of; see `Predicted`."""
    said = (output.kv_transfer_params or {}).get("kv_policy", {})
    return tuple((position, tokens) for position, tokens, _ in said.get("dropped", ()))


def _entries(found: Sequence[Any], token_ids: Tokens) -> list[dict[int, float]]:
    if len(found) != len(token_ids):
        raise RuntimeError(
            f"prompt_logprobs: got {len(found)}, expected {len(token_ids)}"
        )
    return [{token: one.logprob for token, one in entry.items()} for entry in found[1:]]


@contextmanager
def running(engine: Engine, settings: Settings) -> Iterator[Asker]:
    """Make an engine, yield it, and end its processes."""
    os.environ.update(ENVIRONMENT)
    from vllm_kvpolicy import LLM

    blocks = settings.at_once * -(-settings.max_model_len // BLOCK_SIZE)
    if settings.pool_share is not None:
        blocks = int(blocks * settings.pool_share)
    elif settings.as_served:
        blocks *= 2
    llm = LLM(
        str(settings.model),
        **({} if engine.policies == (FULL,) else _with_policies(engine, settings)),
        dtype=settings.dtype,
        kv_cache_dtype=settings.kv_cache_dtype,
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.at_once,
        max_num_batched_tokens=max(BATCHED_TOKENS, settings.at_once),
        kv_cache_memory_bytes=(blocks + 1)
        * block_bytes(settings.model, BLOCK_SIZE, settings.dtype),
        enforce_eager=True,
        enable_prefix_caching=settings.as_served,
        logits_processors=[FORCED] if settings.pool_share is not None else None,
        seed=0,
    )
    try:
        yield Asker(llm, engine.interval)
    finally:
        llm.llm_engine.engine_core.shutdown()


def _with_policies(engine: Engine, settings: Settings) -> dict[str, Any]:
    """Return the keywords that an engine's policies need."""
    policies = [name for name in engine.policies if name != FULL]
    options: dict[str, Any] = {"report_events": True}
    options |= options_of(
        policies,
        engine.variant,
        {"policy_config": settings.policy_config, "variants": settings.variants},
    )
    if settings.trace:
        options["trace"] = str(settings.trace)
    own: dict[str, Any] = {}
    if not settings.as_served:
        own = {"prefill_interval": engine.interval, "pin": "none"}
        options["spread_events"] = False
    return {
        "kv_policy": policies[0],
        "kv_budget": max(settings.budgets),
        "kv_interval": engine.interval,
        "kv_recent": settings.recent,
        "kv_events": settings.events,
        "kv_policy_config": options | {"allow": policies[1:]},
        "additional_config": {"kv_policy": own},
        "block_size": BLOCK_SIZE,
    }
