"""Beside windows, two ranks leave tokens and survivors as they are with one."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch

from support.engine.helpers import Engine, Job, Run
from support.engine.tensor_parallel import compare, fingerprint, watch_events
from support.made_sliding import NUM_FULL, PATTERN, make_gemma3
from support.repetition import repetitive

VALUES = {"budget": 128, "interval": 40, "prefill_interval": 256, "recent": 32}
POLICIES = ("ams-tova", "snapkv", "ams-expected", "h2o", "keydiff")
MOVER = ("identity",)
LENGTHS = (40, 300, 150, 220, 90)
FEATURES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "ranks": {"tensor_parallel_size": 2},
    "both": {"tensor_parallel_size": 2, "enable_prefix_caching": True},
}
SERVED = [("ranks", 1), ("both", 2)]
pytestmark = pytest.mark.slow


def jobs_of(names: tuple[str, ...], is_stock: bool) -> list[Job]:
    """Return five requests of policies; stock vLLM gets the same without policies."""
    chosen = [names[index % len(names)] for index in range(len(LENGTHS))]
    return [
        Job(
            f"{name} {index}",
            repetitive(index, length),
            150,
            extra_args=None if is_stock else {"kv_policy": name},
        )
        for index, (name, length) in enumerate(zip(chosen, LENGTHS, strict=True))
    ]


def caches_of(worker: Any) -> tuple[int, set[torch.dtype]]:
    """Return the bytes and kinds of the tensors that hold a rank's KV cache."""
    caches = worker.model_runner.kv_caches
    assert len(caches) == len(PATTERN)
    stores = [cache.untyped_storage() for cache in caches]
    sizes = {store.data_ptr(): store.nbytes() for store in stores}
    return sum(sizes.values()), {cache.dtype for cache in caches}


@dataclass
class Served:
    """What an engine gave.

    Args:
        run: the requests.
        caches: of each rank, see `caches_of`.
    """

    run: Run
    caches: list[tuple[int, set[torch.dtype]]]


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Served]:
    """Return what serves policies, or stock vLLM, with a feature beside windows."""
    model_of = cache(
        lambda heads: make_gemma3(tmp_path_factory.mktemp("gemma3"), num_kv_heads=heads)
    )

    @cache
    def served(
        feature: str, heads: int, names: tuple[str, ...], is_stock: bool = False
    ) -> Served:
        model = model_of(heads)
        changes = {"max_num_batched_tokens": 96, "max_model_len": 640}
        changes |= {"num_blocks": 52, "foresees": False, **FEATURES[feature]}
        values = {**VALUES, "policy": names[0]}
        if len(names) > 1:
            values["policy_config"] = {"expected_window": 36}
            values["allow"] = list(names[1:])
        policy, trace = (None, None) if is_stock else (values, "trace")
        folder = trace and tmp_path_factory.mktemp(trace)
        with Engine(model, policy, folder, **changes) as engine:
            ask = engine.core.model_executor.collective_rpc
            if not is_stock:
                ask(watch_events)
            run = engine.run(jobs_of(names, is_stock))
            engine.tell_worker_of_the_last_finish()
            assert engine.num_free == engine.num_usable, "superblocks are lost"
            if not is_stock:
                seen = ask(fingerprint)
                assert len({*seen}) == 1 and not seen[0][2], "ranks part"
                assert seen[0][0] == engine.counters()["events"] > len(names)
            return Served(run, ask(caches_of))

    return served


@pytest.mark.parametrize(("feature", "heads"), SERVED)
def test_moving_tokens_changes_nothing(serve, feature: str, heads: int) -> None:
    """Stock vLLM with the feature gives the same tokens in caches of the same kind.

    Of a model with one KV head two ranks have copies of it.
    """
    moved = serve(feature, heads, MOVER)
    stock = serve(feature, heads, MOVER, is_stock=True)
    assert moved.run.tokens == stock.run.tokens
    assert moved.caches == stock.caches
    events = [event for r in moved.run.results.values() for event in r.events]
    assert sum(event.moved for event in events) / len(events) > 0.5
    assert {event.survivors.shape[:2] for event in events} == {(NUM_FULL, heads)}


@pytest.mark.parametrize(("feature", "heads"), SERVED)
def test_what_is_kept_and_said_is_what_it_is_without(
    serve, feature: str, heads: int
) -> None:
    plain, found = serve("nothing", heads, POLICIES), serve(feature, heads, POLICIES)
    differing = compare(plain.run, found.run)
    assert differing.events > len(POLICIES)
    assert not (differing.kept or differing.said), differing
