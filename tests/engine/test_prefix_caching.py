"""Answers with the prefix cache are those without it, for every policy, cold and warm.

Owns the real worker's side of prefix caching: every name of the package on servers
that share prompts, what lies in cached blocks, and second turns.
"""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.engine.async_on_cpu import allow_async_scheduling
from support.engine.dms_decoder import say_dms
from support.engine.helpers import (
    Engine,
    Job,
    Run,
    make_prompt,
    most_hit,
    serve_again,
    watch_hits,
)
from support.engine.tensor_parallel import Heads, options_with_files
from support.sweeps import covering, evictions, some
from support.tiny_model import make_tiny_model
from vllm_kvpolicy.block_manager.planner import RequestState
from vllm_kvpolicy.config_keys import ALWAYS, PRESSURE
from vllm_kvpolicy.policies.names import parse
from vllm_kvpolicy.protocol import UsedBlocks
from vllm_kvpolicy.worker.captures.visible_until import VisibleUntil

HEADS = 2
STEM, SHORT, BUDGET, WINDOW = 320, 80, 128, 32
BASE: dict[str, Any] = {"budget": BUDGET, "interval": 64, "recent": 32, "sinks": 4}
BASE |= {"prefill_interval": "prompt"}
OPTIONS = {"expected_window": 48, "snapmax_window": 48, "lag": 32}
EVICTIONS = covering(evictions())
EQUAL = [name for name in EVICTIONS if not parse(name).is_ragged({})]
RAGGED = [name for name in EVICTIONS if parse(name).is_ragged({})]
ADMITTING = ("wgkv", "wgkv+ams-tova", "wgkv+snapkv+quest", "duo", "duo+tova", "quest")
ADMITTING += ("local", "snapkv+quest", "tova+quest", "kvzap", "kvzap+ams-tova")


def server(allowed: list[str], folder: Path) -> dict[str, Any]:
    """Return the configuration of a server that offers some policies by name."""
    with_files = [name for name in allowed if not name.startswith("dms")]
    options = OPTIONS | options_with_files(with_files, folder, Heads(query=4, kv=2))
    known = {key for name in allowed for key in parse(name).options}
    given = {key: value for key, value in options.items() if key in known}
    return {**BASE, "policy": allowed[0], "allow": allowed[1:], "policy_config": given}


def jobs_of(allowed: list[str], num_tokens: int = 80) -> list[Job]:
    """Return one request per policy, and one without; all begin alike.

    Every third prompt is shorter than the budget: its first event finds superblocks
    that others share before those of its answer.
    """
    stem = make_prompt(1, STEM)
    ends = [
        SHORT if n % 3 == 2 else STEM - 17 * (n % 5) for n in range(len(allowed) + 1)
    ]
    return [
        Job(
            name,
            # Prompts part at different places, most of them inside a block.
            [*stem[: ends[index]], *make_prompt(50 + index, 40 + index % 7)],
            num_tokens,
            arrives=index // 2,
            extra_args={"kv_policy": name},
        )
        for index, name in enumerate([*allowed, "none"])
    ]


def check_equal(model: Path, allowed: list[str], folder: Path, **changes: Any) -> None:
    """Compare answers without the cache, with a cold and with a warm one."""
    policy, jobs = server(allowed, folder), jobs_of(allowed)
    policy |= changes.pop("policy", {})
    (plain,), _ = serve_again(model, policy, jobs, 1, **changes)
    runs, hits = serve_again(
        model, policy, jobs, 2, enable_prefix_caching=True, **changes
    )
    for name, tokens in plain.tokens.items():
        for run in runs:
            assert run.tokens[name] == tokens, name
    for job in jobs:
        assert hits[1][job.name] == most_hit(policy, job), job.name
    assert sum(hits[0].values()) > 80 * len(jobs), "cold requests share, too"


@pytest.mark.parametrize(
    "allowed", [EQUAL, [*RAGGED, *ADMITTING]], ids=["equal", "ragged"]
)
def test_every_policy_answers_as_without_the_cache(
    tiny_model: Path, tmp_path: Path, allowed: list[str]
) -> None:
    check_equal(tiny_model, allowed, tmp_path, num_blocks=700)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_with_room_for_all_everything_is_as_stock_has_it(
    tiny_model: Path, tmp_path: Path, is_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With events on call: answers, hits and steps, the cache cold and warm."""
    admitted = [name for name in ADMITTING if not parse(name).is_unbounded]
    allowed = [n for n in (*EVICTIONS, *admitted) if not parse(n).measures_tokens]
    values = server(allowed, tmp_path) | {"events": PRESSURE}
    jobs = [replace(job, extra_args=None) for job in jobs_of(allowed)]
    changes = {"enable_prefix_caching": True, "max_num_batched_tokens": 160}
    changes |= {"num_blocks": 700, "max_num_seqs": 32}
    if is_async:
        allow_async_scheduling(monkeypatch)
    expected, of_stock = serve_again(tiny_model, None, jobs, 2, **changes)
    found, hits = serve_again(tiny_model, values, jobs_of(allowed), 2, **changes)
    for run, stock in zip(found, expected, strict=True):
        run.check_answers(stock)
        assert run.steps == stock.steps
        assert not run.calls
    assert hits == of_stock and sum(hits[0].values()) > 100 * len(jobs)


@pytest.fixture(scope="module")
def deciding_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_tiny_model(tmp_path_factory.mktemp("dms"))
    say_dms(folder, dms_window_size=WINDOW, dms_cr=2)
    return folder


@pytest.mark.parametrize("exact", [False, True])
def test_a_model_that_decides_answers_as_without_the_cache(
    deciding_model: Path, tmp_path: Path, exact: bool
) -> None:
    options = {"policy_config": {"exact": exact}}
    check_equal(
        deciding_model, ["dms", "dms+ams-snapkv", "dms+quest"], tmp_path, policy=options
    )


BRANCHES = 5
LAST_OF_STEM = 96  # tokens, whole superblocks: the next token decides about the last
TOLERANCE = 1e-4  # of log-probabilities, fp32; another branch's decisions make 4e-2


def branches(number: int) -> list[list[Job]]:
    """Return jobs whose prompts part at the edge of a superblock of a stem, by rounds.

    The stem goes on as X or Y, or otherwise without DMS while X runs. X comes back
    after Y has decided about the stem's end.
    """
    stem = make_prompt(700 + number, LAST_OF_STEM)
    x, y = ([*stem, *make_prompt(seed + number, 64)] for seed in (720, 740))
    none = {"kv_policy": "none"}

    def job(name: str, start: list[int], own: int, tokens: int, **more: Any) -> Job:
        prompt = [*start, *make_prompt(1000 * own + number, 20 + own)]
        return Job(f"{name}{number}", prompt, tokens, **more)

    return [
        [job("x", x, 1, 100), job("none", stem, 2, 4, arrives=2, extra_args=none)],
        [job("y", y, 3, 4)],
        [job("x again", x, 4, 40)],
    ]


def most_likely(runs: Iterable[Run]) -> dict[str, np.ndarray]:
    """Return per job [tokens, TOP_LOGPROBS] log-probabilities, descending."""
    return {
        name: np.sort([list(entry.values()) for entry in result.logprobs])[:, ::-1]
        for run in runs
        for name, result in run.results.items()
    }


@pytest.mark.parametrize("exact", some([True, False]))
def test_decisions_of_other_branches_are_not_shared(
    deciding_model: Path, tmp_path: Path, exact: bool
) -> None:
    policy = server(["dms"], tmp_path) | {"policy_config": {"exact": exact}}
    found = []
    for caching in (False, True):
        changes = {"enable_prefix_caching": caching, "num_blocks": 300}
        with Engine(deciding_model, policy, **changes) as engine:
            hits = watch_hits(engine)
            rounds = zip(*map(branches, range(BRANCHES)), strict=True)
            found.append(most_likely(engine.run(sum(jobs, [])) for jobs in rounds))
    cold, warm = found
    wrong = [n for n in cold if not np.allclose(warm[n], cold[n], atol=TOLERANCE)]
    assert not wrong
    assert sum(hits.values()) >= BRANCHES * 190


def test_gates_that_mask_at_once_answer_as_without_the_cache(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Those that mask share among themselves, the others among theirs."""
    allowed = ["wgkv", "wgkv+snapkv", "knorm", "tova"]
    given = server(allowed, tmp_path)["policy_config"]
    options = {**given, "wgkv_threshold": 0.5, "exact": True}
    check_equal(tiny_model, allowed, tmp_path, policy={"policy_config": options})


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [{"max_num_batched_tokens": 96}, {"num_blocks": 46, "foresees": False}]
)
@pytest.mark.parametrize("allowed", [["ams-tova", "snapkv"], ["hard-snapkv", "wgkv"]])
def test_chunks_and_preemptions_change_nothing(
    tiny_model: Path, tmp_path: Path, allowed: list[str], changes: dict[str, int]
) -> None:
    policy, jobs = server(allowed, tmp_path), jobs_of(allowed * 4, 260)
    policy["prefill_interval"] = 256
    jobs = [replace(job, name=f"{n}-{job.name}") for n, job in enumerate(jobs)]
    (plain,), _ = serve_again(tiny_model, policy, jobs, 1, num_blocks=700)
    changes = {"max_model_len": 768, **changes}
    runs, _ = serve_again(
        tiny_model, policy, jobs, 2, enable_prefix_caching=True, **changes
    )
    for run in runs:
        assert run.tokens == plain.tokens
        assert run.preemptions > 0 or "num_blocks" not in changes


# -- what lies in cached superblocks ---------------------------------------------------


def cached_pages(engine: Engine) -> dict[tuple[int, Any], torch.Tensor]:
    """Return copies of all cached superblocks by id and hash."""
    blocks = engine.scheduler.kv_cache_manager.block_pool.blocks
    caches = [layer.kv_cache for layer in engine.worker.kv_policy_setup.layers]
    for capture in engine.worker.kv_policy_setup.captures:
        if isinstance(capture, VisibleUntil):
            pages = len(caches[0]) * HEADS
            caches += [part for u in capture.until[:1] for part in u.split(pages)]
    caches = [cache.reshape(len(blocks), -1).float() for cache in caches]
    return {
        (block.block_id, block.block_hash): torch.cat(
            [cache[block.block_id] for cache in caches]
        )
        for block in blocks
        if block.block_hash is not None
    }


@pytest.mark.parametrize(
    ("allowed", "events", "num_tokens"),
    [
        (["ams-tova", "tova"], ALWAYS, 80),
        (["hard-snapkv", "adakv-knorm", "wgkv", "wgkv+tova"], ALWAYS, 80),
        (["hard-snapkv", "ams-tova", "tova"], PRESSURE, 260),  # short of superblocks
    ],
)
def test_cached_superblocks_are_never_written_again(
    tiny_model: Path, tmp_path: Path, allowed: list[str], events: str, num_tokens: int
) -> None:
    policy, jobs = server(allowed, tmp_path), jobs_of(allowed * 2, num_tokens)
    policy["events"] = events
    jobs = [replace(job, name=f"{n}-{job.name}") for n, job in enumerate(jobs)]
    copies: dict[tuple[int, Any], torch.Tensor] = {}
    compared = 0

    def compare(engine: Engine) -> None:
        nonlocal compared
        now = cached_pages(engine)
        for key, pages in now.items():
            if key in copies:
                compared += 1
                assert torch.equal(pages, copies[key]), key
            copies[key] = pages

    with Engine(
        tiny_model, policy, num_blocks=70, enable_prefix_caching=True
    ) as engine:
        for _ in range(2):
            engine.run(jobs, compare)
        assert engine.counters()["events"] > 10
    assert compared > 1000


# -- resets ----------------------------------------------------------------------------


class Resetting:
    """Resets the cache of an engine that runs, a few times; requests begin anew.

    Attributes:
        resets: so far.
        late: answers to events from before a reset that came after it.
    """

    def __init__(self, engine: Engine) -> None:
        self.resets, self.late, self._pause = 0, 0, 8
        self.planner = engine.scheduler.kv_policy_planner
        surplus = self.planner.surplus

        def heard(used: UsedBlocks) -> tuple[int, int] | None:
            found, state = surplus(used), self.planner.states.get(used.request_id)
            if state is not None and state.serial != used.serial:
                self.late += 1
                assert found is None, "an answer about superblocks that are gone"
            return found

        self.planner.surplus = heard

    def __call__(self, engine: Engine) -> None:
        """Reset after a pause; amid an event where steps are under way."""
        self._pause -= 1
        queue = engine.core.batch_queue
        amid = any(step[1].kv_policy_commands.events for step in queue or ())
        if (
            self._pause > 0
            or not engine.scheduler.running
            or not (amid or queue is None)
        ):
            return
        self.resets, self._pause = self.resets + 1, 23 * (self.resets + 1)
        assert engine.llm.reset_prefix_cache(reset_running_requests=True)
        assert engine.num_free == engine.num_usable
        assert not cached_pages(engine)
        planner = self.planner
        assert planner.num_global_blocks == 0 and not planner._windows
        states = planner.states.values()
        begun = (RequestState(each.plan, earlier=each.earlier) for each in states)
        assert list(states) == list(begun)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(
    "allowed", [["ams-tova", "snapkv"], ["wgkv", "wgkv+snapkv", "adakv-snapkv"]]
)
def test_resets_amid_answers_change_nothing(
    tiny_model: Path,
    tmp_path: Path,
    allowed: list[str],
    is_async: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy, jobs = server(allowed, tmp_path), jobs_of(allowed, 150)
    (plain,), _ = serve_again(tiny_model, policy, jobs, 1)
    if is_async:
        allow_async_scheduling(monkeypatch)
    with Engine(tiny_model, policy, enable_prefix_caching=True) as engine:
        assert (engine.core.batch_queue is not None) == is_async
        resetting = Resetting(engine)
        run = engine.run(jobs, resetting)
    assert run.tokens == plain.tokens
    cold, warm = most_likely([plain]), most_likely([run])
    wrong = [n for n in cold if not np.allclose(warm[n], cold[n], atol=TOLERANCE)]
    assert not wrong
    assert resetting.resets >= 3 and run.preemptions >= 3 * len(jobs)
    assert resetting.late > 0 or not (is_async and "wgkv" in allowed)
