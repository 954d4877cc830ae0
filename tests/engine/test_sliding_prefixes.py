"""The prefix cache beside windows and states changes no token and no survivor."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
from vllm.v1.core.kv_cache_utils import get_block_hash

from support.engine.helpers import (
    BLOCK,
    Engine,
    Job,
    Run,
    make_prompt,
    most_hit,
    serve_again,
    watch_hits,
)
from support.engine.tensor_parallel import compare
from support.made_hybrids import DOUBLED, SETTINGS
from support.sweeps import every_name, paired

VALUES = {"budget": 128, "interval": 40, "prefill_interval": 256, "recent": 32}
COMMON = ("ams-tova", "snapkv", "h2o", "streaming", "keydiff")
KINDS = ("gpt_oss", "lfm2", "gemma4_31b", "gemma4_e2b", "mimo_v2", "gemma3n")
POLICIES = {"gemma3": (*COMMON, "ams-expected", "adakv-snapkv")}
POLICIES |= dict.fromkeys(KINDS, COMMON)
# Windows of one size and of two, and states; test_sliding_replay has the others.
SOME = tuple(POLICIES) if every_name else ("gemma3", "lfm2", "gemma4_e2b")
CROWDED = tuple(POLICIES) if every_name else ("gemma3", "gemma4_31b", "lfm2")
HASHED = tuple(POLICIES) if every_name else ("gemma4_31b", "gemma4_e2b")
# Tokens per superblock of full attention, and of the largest superblocks.
BLOCKS = {"gemma4_31b": (64, 64), "gemma4_e2b": (32, 64), "mimo_v2": (64, 64)}
LARGE = {"budget": 160, "prefill_interval": 384}
BUDGETS = {"identity": 128, "ams-tova": 2048}  # the second never binds
# Steps that read part of a prompt; a pool in which requests preempt each other.
CHUNKS = {"max_num_batched_tokens": 96, "max_model_len": 640}
TIGHT = {**CHUNKS, "foresees": False}
NUM_BLOCKS = {"gemma3": 72, "gpt_oss": 48, "lfm2": 60}
NUM_BLOCKS |= {"gemma4_31b": 48, "gemma4_e2b": 48, "mimo_v2": 48, "gemma3n": 60}
STEM = 320


def jobs_of(names: tuple[str, ...], is_stock: bool = False) -> list[Job]:
    """Return two requests for each name, of several lengths, most of which begin alike.

    Prompts part in the middle of a superblock and at its edge, at several places; some
    are too short for an event.
    """
    stem, found = make_prompt(1, STEM), []
    for index in range(2 * len(names)):
        start = (320, 288, 177, 100, 64, 250)[index % 6]
        own = make_prompt(50 + index, (45, 7, 90, 20)[index % 4])
        name = names[index % len(names)]
        found.append(
            Job(
                f"{name} {index}",
                [*stem[:start], *own],
                110,
                arrives=3 * index,
                extra_args=None if is_stock else {"kv_policy": name},
            )
        )
    return found


@dataclass
class Served:
    """What an engine gave."""

    runs: list[Run]
    hits: list[Counter[str]]
    values: dict[str, Any]


def reset_sometimes(engine: Engine) -> None:
    """Reset the prefix cache in a few steps; what runs begins anew."""
    engine.resets = getattr(engine, "resets", 0) + 1
    if engine.resets in (25, 60, 120):
        assert engine.llm.reset_prefix_cache(reset_running_requests=True)
        assert engine.num_free == engine.num_usable
        blocks = engine.scheduler.kv_cache_manager.block_pool.blocks
        assert not any(block.block_hash for block in blocks)


@pytest.fixture(scope="module")
def in_crowds(folders) -> Callable[..., Served]:
    """Return what preempting requests got, twice, of a policy or of stock vLLM."""

    @cache
    def served(kind: str, policy: str | None) -> Served:
        values = policy and {"policy": policy, **VALUES, "budget": BUDGETS[policy]}
        if kind in DOUBLED and policy == "identity":
            values |= LARGE
        jobs = jobs_of(tuple(BUDGETS), is_stock=True) * 3
        jobs = [replace(job, name=f"{n}") for n, job in enumerate(jobs)]
        changes = {**TIGHT, "num_blocks": NUM_BLOCKS[kind], **SETTINGS.get(kind, {})}
        changes["enable_prefix_caching"] = True
        model = folders(kind)
        found = Served(*serve_again(model, values, jobs, **changes), values or {})
        if policy:
            counted = found.runs[-1].counters
            assert (counted["events"] > 20) == (policy == "identity")
            assert not counted["tokens_dropped"]
        return found

    return served


@pytest.fixture(scope="module")
def in_peace(folders, tmp_path_factory) -> Callable[..., Served]:
    """Return what requests of all policies got: cold, warm, with resets and aborts."""

    @cache
    def served(kind: str, is_caching: bool) -> Served:
        names = POLICIES[kind]
        values: dict[str, Any] = {**VALUES, "policy": names[0], "allow": names[1:]}
        values |= LARGE if kind in DOUBLED else {}
        if "ams-expected" in names:
            values["policy_config"] = {"expected_window": 36}
        jobs, found = jobs_of(names), Served([], [], values)
        cut = [
            replace(job, aborted=9 + index) if index % 4 == 1 else job
            for index, job in enumerate(jobs)
        ]
        times = [(jobs, None), (jobs, None), (cut, reset_sometimes)]
        changes = {**CHUNKS, "enable_prefix_caching": is_caching}
        changes |= SETTINGS.get(kind, {})
        trace = tmp_path_factory.mktemp("trace")
        with Engine(folders(kind), values, trace, **changes) as engine:
            for given, on_step in times if is_caching else times[:1]:
                hits = watch_hits(engine)
                found.runs.append(engine.run(given, on_step))
                found.hits.append(hits)
        return found

    return served


@pytest.mark.parametrize(("kind", "policy"), paired(CROWDED, BUDGETS))
def test_what_drops_nothing_is_stock(in_crowds, kind: str, policy: str) -> None:
    ours, stock = in_crowds(kind, policy), in_crowds(kind, None)
    for run, hits, other in zip(ours.runs, ours.hits, stock.runs, strict=True):
        assert run.tokens == other.tokens
        assert run.preemptions > 0 and sum(hits.values()) > 500
    assert len({tuple(tokens) for tokens in run.tokens.values()}) > 3
    if BUDGETS[policy] > CHUNKS["max_model_len"]:
        assert ours.hits == stock.hits, "a budget that never binds shares as much"
        preemptions = [run.preemptions for run in ours.runs]
        assert preemptions == [run.preemptions for run in stock.runs]


@pytest.mark.parametrize("kind", SOME)
def test_what_is_kept_and_said_is_what_it_is_without(in_peace, kind: str) -> None:
    (plain,), shared = in_peace(kind, False).runs, in_peace(kind, True)
    cold, warm, cut = shared.runs
    for run in (cold, warm):
        found = compare(plain, run)
        assert found.events > 2 * len(plain.results)
        assert not (found.kept or found.said), found
    assert cut.preemptions > 3
    for name, result in cut.results.items():
        aborted, expected = result.job.aborted, plain.tokens[name]
        assert result.tokens == expected[: len(result.tokens)], name
        assert aborted or len(result.tokens) == len(expected)
    assert sum(bool(each.job.aborted) for each in cut.results.values()) > 2


@pytest.mark.parametrize("kind", SOME)
def test_requests_share_as_much_as_their_events_let_them(in_peace, kind: str) -> None:
    shared = in_peace(kind, True)
    cold, warm, _ = shared.hits
    assert sum(cold.values()) > 300
    sizes = BLOCKS.get(kind, (BLOCK, BLOCK))
    expected = {
        job.name: most_hit(shared.values, job, sizes) for job in jobs_of(POLICIES[kind])
    }
    assert warm == Counter(expected)
    assert not in_peace(kind, False).hits[0].total()


@pytest.mark.parametrize("kind", HASHED)
def test_superblocks_are_known_by_their_groups_hashes(folders, kind: str) -> None:
    """A request has hashes of the smallest superblocks of all groups."""
    values = {"policy": "ams-tova", **VALUES, "budget": 2048}
    found: list[int] = []

    def note(engine: Engine) -> None:
        manager = engine.scheduler.kv_policy_manager
        for request in engine.scheduler.running:
            row = manager.req_to_blocks[request.request_id]
            known = [get_block_hash(each.block_hash) for each in row if each.block_hash]
            assert known == list(manager.hashes(request)[: len(known)])
            found.append(len(known))

    changes = {**CHUNKS, "enable_prefix_caching": True}
    with Engine(folders(kind), values, **changes) as engine:
        engine.run(jobs_of(("ams-tova",)), note)
    assert max(found) >= 5
