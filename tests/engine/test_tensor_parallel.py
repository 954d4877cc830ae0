"""Two ranks of vLLM's own tensor parallelism give what one gives.

Policies decide head by head, so that what is kept and said has to be the same; those
that share a budget among heads share it among those of a rank, and are compared with a
decoder that sees what they kept. Float32: sums over ranks differ by rounding alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from support.engine.helpers import Engine, Run, make_jobs, one_job_each, serve
from support.engine.oracle_replay import check_replay
from support.engine.reference_decoder import ReferenceDecoder
from support.engine.tensor_parallel import (
    POLICY,
    WINDOWS,
    Comparison,
    Heads,
    break_events,
    check_ranks,
    compare,
    options_with_files,
    run_on,
    storm,
    watch_events,
    write_model,
)
from support.made_hybrids import LATENTS, SETTINGS
from support.made_sliding import NUM_FULL, PATTERN
from support.repetition import repetitive
from support.sweeps import covering, evictions, some
from vllm_kvpolicy.commands.trials import LATENT, make_gemma3
from vllm_kvpolicy.config_keys import PRESSURE
from vllm_kvpolicy.policies.names import parse

SHARED = Heads(query=8, kv=4)  # two KV heads on each of two ranks
COPIED = Heads(query=4, kv=1)  # one KV head, on both
SERVED = covering(evictions())
EQUAL = tuple(name for name in SERVED if not parse(name).is_ragged({}))
# Heads of a rank share a budget, or whole pages, among themselves.
OWN_BUDGETS = ("adakv", "hard", "trim", "pyramid")
RAGGED = tuple(name for name in SERVED if parse(name).is_ragged({}))
RAGGED += ("wgkv", "wgkv+snapkv", "wgkv+trim-snapmax", "local", "duo", "snapkv+quest")
# The model normalises its keys: their lengths differ by rounding, which sums decide.
TIES = "knorm"

Pair = tuple[Run, Run]


def is_own(name: str) -> bool:
    """Return whether the heads of a rank share what a policy may keep."""
    return name.rpartition("+")[2].partition("-")[0] in OWN_BUDGETS


def differing(found: Comparison) -> set[str]:
    """Return the names of requests that differ in what is kept or said."""
    return {text.partition(" ")[0] for text in (*found.kept, *found.said)}


@pytest.fixture(scope="module")
def on_both(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Pair]:
    """Return a function that serves names on one rank and on two, once each."""

    @cache
    def run(
        served: Sequence[str], heads: Heads = SHARED, num_blocks: int = 60, **more: Any
    ) -> Pair:
        folder = tmp_path_factory.mktemp("tp")
        model = write_model(folder / "model", heads)
        options = options_with_files(served, folder, heads)
        known = {key for name in served for key in parse(name).options}
        options |= {key: value for key, value in WINDOWS.items() if key in known}
        options |= {key: more.pop(key) for key in ("exact", "variant") if key in more}
        one, two = (
            run_on(ranks, model, served, options, folder, num_blocks, **more)
            for ranks in (1, 2)
        )
        for name in ("events", "tokens_kept", "blocks_returned", "requests"):
            if heads is SHARED:  # otherwise windows take fewer superblocks
                assert one.counters[name] == two.counters[name], name
        return one, two

    return run


@pytest.mark.slow
def test_heads_of_equal_lengths_are_those_of_one_rank(on_both) -> None:
    one, two = on_both(EQUAL, num_blocks=36)
    assert one.preemptions == two.preemptions > 5
    found = compare(one, two)
    assert found.events > 2 * len(EQUAL)
    assert all(name.endswith(TIES) for name in differing(found)), found


@pytest.mark.slow
def test_admissions_and_selections_are_those_of_one_rank(on_both) -> None:
    one, two = on_both(RAGGED, num_blocks=36)
    assert one.preemptions == two.preemptions > 2
    found = compare(one, two)
    assert found.events > len(RAGGED)
    assert all(is_own(name) for name in differing(found)), found
    assert any(name.startswith("hard") for name in differing(found)), "compares nothing"


@pytest.mark.parametrize(
    "served", some([("dms", "dms+snapkv", "dms+ams-tova"), ("kvzap", "kvzap+snapkv")])
)
def test_decisions_of_the_model_are_those_of_one_rank(on_both, served) -> None:
    found = compare(*on_both(served, num_blocks=24))
    assert found.events > len(served) and not differing(found), found


@pytest.mark.parametrize("variant", some(["lag-kv", "kv-key", "kv-val", "segment"]))
def test_means_over_kv_heads_are_those_of_one_rank(on_both, variant) -> None:
    """Prompts stay, so that answers are long before there is an event."""
    found = compare(*on_both(("epikv", "rpc"), variant=variant, answer=260))
    assert found.events > 2 and not differing(found), found


@pytest.mark.slow
def test_gates_that_hide_at_once_are_those_of_one_rank(on_both) -> None:
    found = compare(*on_both(("wgkv",), exact=True))
    assert found.events and not differing(found), found


@pytest.mark.slow
def test_budgets_of_a_rank_hold_and_attention_follows_them(on_both, tmp_path) -> None:
    """Every rank keeps its share; a dense decoder that sees what is kept agrees."""
    two = on_both(RAGGED, num_blocks=36)[1]
    decoder = ReferenceDecoder(write_model(tmp_path, SHARED))
    per_rank = SHARED.kv // 2
    for name in filter(is_own, RAGGED):
        check_replay(decoder, two.results[name])
        for event in two.results[name].events:
            kept = (event.selected >= 0).sum(-1)  # [L, H]
            for first in range(0, SHARED.kv, per_rank):
                share = kept[:, first : first + per_rank]
                total = event.budget * share.size
                if name.startswith(("adakv", "pyramid")):
                    assert share.sum() == total
                assert share.sum() <= total


@pytest.mark.parametrize(
    "served",
    some(
        [
            ("tova", "snapkv", "ams-tova", "h2o", "expected", "rpc", "triattention"),
            (
                "wgkv",
                "duo",
                "wgkv+snapkv",
                "chunk-snapkv",
                "qfilter",
                "random",
                "ams-rkv",
            ),
            ("dms", "dms+snapkv"),
        ]
    ),
)
def test_copies_of_a_head_decide_alike(on_both, served) -> None:
    """Each rank computes half of the queries; windows go over all of them."""
    one, two = on_both(served, COPIED)
    found = compare(one, two)
    assert found.events > len(served) and not differing(found), found


def test_requests_that_share_prompts_and_steps_ahead(on_both) -> None:
    """The prefix cache and asynchronous scheduling do not know of ranks."""
    served = ("ams-tova", "snapkv", "hard-snapkv", "trim-random")
    changes = {"enable_prefix_caching": True, "async_scheduling": True}
    found = compare(*on_both(served, num_blocks=100, **changes))
    own = {name for name in served if is_own(name)}
    assert found.events > len(served) and differing(found) <= own, found


@pytest.mark.slow
def test_events_on_call_are_those_of_one_rank(on_both, tmp_path: Path) -> None:
    """The scheduler calls for them and tells all ranks; with room it calls for none."""
    served = ("ams-tova", "snapkv", "hard-snapkv", "tova")
    changes = {"events": PRESSURE, "foresees": True}
    one, two = on_both(served, num_blocks=30, **changes)
    record = [each.record for each in one.results.values()]
    assert record == [each.record for each in two.results.values()]
    found = compare(one, two)
    assert found.events > len(served)
    assert differing(found) <= {name for name in served if is_own(name)}, found
    decoder = ReferenceDecoder(write_model(tmp_path, SHARED))
    for result in two.results.values():
        check_replay(decoder, result)
    whole = on_both(served, num_blocks=100, **changes)[1]
    assert not whole.calls
    jobs = [each.job for each in whole.results.values()]
    stock = serve(write_model(tmp_path, SHARED), None, jobs, tensor_parallel_size=2)
    assert whole.tokens == stock.tokens


@pytest.mark.slow
def test_ranks_never_part(tmp_path: Path) -> None:
    """A crowd of requests, preempted and aborted: both ranks see the same events."""
    served = ("ams-tova", "hard-snapkv", "trim-tova", "streaming", "hard-rpc")
    model = write_model(tmp_path / "model", SHARED)
    options = options_with_files(served, tmp_path, SHARED)
    values = {**POLICY, "interval": 40, "policy": served[0], "allow": served[1:]}
    # Heads of very different lengths, so that ranks differ in their longest.
    values["policy_config"] = {**options, "hard_p": 0.3, "hard_lower": 0.1}
    changes = {"num_blocks": 70, "max_model_len": 512, "foresees": False}
    with Engine(model, values, tensor_parallel_size=2, **changes) as engine:
        ask = engine.core.model_executor.collective_rpc
        ask(watch_events)
        run = engine.run(storm(1, 60, served))
        check_ranks(engine)
        assert run.counters["events"] > 100 and run.preemptions > 5
        # A rank that fails alone takes the engine with it; nobody waits for ever.
        ask(break_events)
        with pytest.raises(RuntimeError):
            engine.run(make_jobs((300,), 100))


WINDOWED = ("ams-tova", "snapkv", "ams-expected", "h2o", "keydiff")
SHARING = ("ams-tova", "snapkv", "tova", "h2o", "streaming")  # of latent vectors
BASE = {"budget": 128, "interval": 40, "prefill_interval": 256, "recent": 32}
NUM_LAYERS = 6  # of the made LFM2


def caches_of(worker: Any) -> tuple[int, set[torch.dtype]]:
    """Return the bytes and kinds of the tensors that hold a rank's KV cache."""
    caches = list[torch.Tensor]()
    for each in worker.model_runner.kv_caches:  # of a state, a list of its parts
        caches += [each] if isinstance(each, torch.Tensor) else each
    assert len(caches) in (len(PATTERN), NUM_LAYERS, LATENT["num_hidden_layers"])
    stores = [cache.untyped_storage() for cache in caches]
    sizes = {store.data_ptr(): store.nbytes() for store in stores}
    return sum(sizes.values()), {cache.dtype for cache in caches}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "heads", "is_caching"),
    [
        ("gemma3", 1, False),
        ("gemma3", 2, True),
        ("lfm2", 2, True),
        ("deepseek_v3", 1, False),
    ],
)
def test_beside_windows_and_states_two_ranks_are_as_one(
    folders: Callable[[str], Path],
    tmp_path: Path,
    kind: str,
    heads: int,
    is_caching: bool,
) -> None:
    """Tokens that move give stock's, in caches of the same kind; others are kept alike.

    Of a model with one KV head two ranks have copies of it, and of latent vectors.
    """
    if kind == "gemma3":
        model = make_gemma3(tmp_path / kind, num_kv_heads=heads)
    else:
        model = folders(kind)
    names = SHARING if kind in LATENTS else WINDOWED
    jobs = one_job_each(names, (40, 300, 150, 220, 90), 150, 0, repetitive)
    free = [replace(job, extra_args=None) for job in jobs]
    both = {"tensor_parallel_size": 2, "enable_prefix_caching": is_caching}
    sizes = {"max_num_batched_tokens": 96, "max_model_len": 640, "num_blocks": 52}
    sizes |= SETTINGS.get(kind, {})
    offer = {**BASE, "policy": names[0], "allow": list(names[1:])}
    offer["policy_config"] = {} if kind in LATENTS else {"expected_window": 36}
    mover = {**BASE, "policy": "identity"}
    runs, caches = [], []
    for values, asked, more in (
        (offer, jobs, {}),
        (offer, jobs, both),
        (mover, free, both),
        (None, free, both),
    ):
        trace = tmp_path / str(len(runs)) if values else None
        changes = {**sizes, **more}
        with Engine(model, values, trace, foresees=False, **changes) as engine:
            ask = engine.core.model_executor.collective_rpc
            if values:
                ask(watch_events)
            runs.append(engine.run(asked))
            caches.append(ask(caches_of))
            if values:
                check_ranks(engine)
    one, two, moved, stock = runs
    found = compare(one, two)
    assert found.events > len(names) and not differing(found), found
    assert moved.tokens == stock.tokens and caches[2] == caches[3]
    moved.check_moved((3 if kind in LATENTS else NUM_FULL, heads))
