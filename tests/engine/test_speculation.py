"""Drafts with policies: the tokens and survivors of servers without drafts.

n-grams are looked up in a request. Suffix trees, which need a package, hold the answers
so far as well; how many tokens they draft varies.

A step that computes several tokens of a request rounds float32 sums in another order
than one that computes a single token, which may change a choice where two scores are
nearly equal. The models are tiny and all seeds are fixed: here nothing is.
"""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from support.calibration_files import options_for
from support.engine.dms_decoder import say_dms
from support.engine.helpers import BLOCK, Engine, Job, Run, config_of, serve_again
from support.engine.oracle_replay import check_replay
from support.engine.oracle_selection import Report, check_selection
from support.engine.reference_decoder import ReferenceDecoder
from support.engine.tensor_parallel import Heads, options_with_files
from support.made_hybrids import SETTINGS
from support.repetition import (
    METHODS,
    SPECULATION,
    SUFFIX,
    Drafts,
    needs_suffix,
    repetitive,
    watch_drafts,
)
from support.sweeps import covering, every_name, evictions
from support.tiny_model import make_tiny_model
from vllm_kvpolicy.config_keys import PRESSURE
from vllm_kvpolicy.policies.names import parse

VALUES = {"budget": 128, "interval": 36, "prefill_interval": 256}
NEVER_CUT: dict[str, dict[str, Any]] = {
    "ams-tova": {"budget": 512, "interval": 64},
    "adakv-snapkv": {"events": PRESSURE},  # where there is room
}
# Each word of evictions whose heads have equal lengths, and some of all others but
# admissions.
EQUAL = covering(
    [n for n in evictions() if not parse(n).is_ragged({}) and "epikv" not in n]
)
ALL = [
    *dict.fromkeys([*EQUAL, "ams-tova"]),
    *("adakv-snapkv", "hard-snapkv", "pyramid-tova", "trim-snapkv", "local"),
    *("quest", "snapkv+quest"),
]


def jobs_of(lengths: tuple[int, ...], max_tokens: int = 120) -> list[Job]:
    prompts = [repetitive(seed, length) for seed, length in enumerate(lengths)]
    return [Job(f"r{n}", prompt, max_tokens) for n, prompt in enumerate(prompts)]


def run(
    model: Path, policy: dict[str, Any] | None, jobs: list[Job], **engine: Any
) -> tuple[Run, Drafts]:
    """Run jobs with or without drafts."""
    with Engine(model, policy, **engine) as started:
        drafts = watch_drafts(started)
        return started.run(jobs), drafts


SIZES = {"num_blocks": 1500, "max_num_batched_tokens": 128, "max_model_len": 832}


@pytest.fixture(scope="module")
def plain(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory):
    """All policies on one server without drafts: what was asked, and the answers."""
    folder = tmp_path_factory.mktemp("speculation")
    windows = ("expected_window", "snapmax_window", "rpc_window", "rkv_window")
    options = dict.fromkeys(windows, 36) | {"allow": ALL}
    for scorer in ("triattention", "qfilter"):
        options |= options_for(scorer, folder, 2, 2, 2, 32)
    values = {"policy": ALL[0], **VALUES, "policy_config": options}
    jobs = [
        Job(
            name,
            repetitive(7000 + number, (120, 180, 300)[number % 3]),
            # Where the prompt is kept, the budget comes behind it.
            200 if parse(name).pins_prompt else 120,
            extra_args={"kv_policy": name}
            | ({"kv_budget": 80} if parse(name).pins_prompt else {}),
        )
        for number, name in enumerate(ALL)
    ]
    found, _ = run(tiny_model, values, jobs, trace=folder / "plain", **SIZES)
    return values, jobs, found


@pytest.fixture(scope="module", params=METHODS)
def served(
    plain, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, request: Any
):
    """The same server without and with drafts."""
    values, jobs, expected = plain
    folder = tmp_path_factory.mktemp("drafts")
    drafting = {"trace": folder, "speculative_config": request.param}
    return expected, *run(tiny_model, values, jobs, **drafting, **SIZES)


@pytest.mark.parametrize("name", ALL)
def test_tokens_and_survivors_are_those_without_drafts(
    served, tiny_model: Path, name: str
) -> None:
    plain, drafting, drafts = served
    drafting.results[name].check_kept(plain.results[name])
    assert len(plain.results[name].events) >= 3
    assert 10 < drafts.accepted[name] < drafts.drafted[name] - 10


def test_drafts_save_steps(served) -> None:
    plain, drafting, _ = served
    assert drafting.steps < 0.8 * plain.steps


@pytest.mark.parametrize("method", METHODS)
def test_events_on_call_are_those_of_the_references(
    tiny_model: Path, tmp_path: Path, method: dict[str, Any]
) -> None:
    """In a pool that is too small, where drafts are under way when events are called.

    What is called for depends on drafts, so that no run without them is alike.
    """
    values = {"policy": "ams-snapkv", **VALUES, "interval": 64, "events": PRESSURE}
    sizes = {"max_num_batched_tokens": 96, "max_model_len": 512, "num_blocks": 28}
    sizes |= {"trace": tmp_path, "speculative_config": method}
    jobs = jobs_of((40, 150, 300, 90, 60), 150)
    found, drafts = run(tiny_model, values, jobs, **sizes)
    decoder, report = ReferenceDecoder(tiny_model), Report()
    for result in found.results.values():
        check_replay(decoder, result)
        config = config_of(values)
        check_selection(decoder, result, config, BLOCK, report)
    report.check()
    assert report.decisions >= 20
    assert 0.1 < drafts.share < 0.9 and not found.preemptions


@pytest.mark.parametrize("method", METHODS)
def test_what_never_cuts_accepts_what_stock_accepts(
    tiny_model: Path, method: dict[str, Any]
) -> None:
    jobs = jobs_of((40, 150, 300))
    sizes = {"max_model_len": 512, "speculative_config": method}
    stock, of_stock = run(tiny_model, None, jobs, **sizes)
    for policy, values in NEVER_CUT.items():
        values = {"policy": policy, **VALUES, **values}
        found, drafts = run(tiny_model, values, jobs, **sizes)
        assert not found.calls
        assert found.tokens == stock.tokens
        assert drafts == of_stock, "the same drafts were right"
        assert drafts.count > 200


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "policy", ["identity", "holes", "snapkv", "ams-tova", "hard-snapkv"]
)
def test_preemption_with_drafts_waiting(
    tiny_model: Path, policy: str, method: dict[str, Any]
) -> None:
    """In a pool that is too small, from prompts of one token on, in chunks."""
    strain = {"num_blocks": 20, "foresees": False, "speculative_config": method}
    found, drafts = run_six(tiny_model, policy, **strain)
    assert found.tokens == run_six_in_room(tiny_model, policy).tokens
    assert found.preemptions > 0 and drafts.interrupted > 0


def run_six(model: Path, policy: str, **engine: Any) -> tuple[Run, Drafts]:
    jobs = jobs_of((1, 40, 150, 300, 90, 60))
    sizes = {"max_num_batched_tokens": 96, "max_model_len": 512}
    return run(model, {"policy": policy, **VALUES}, jobs, **sizes, **engine)


@cache
def run_six_in_room(model: Path, policy: str) -> Run:
    """Run without drafts, and without a preemption."""
    return run_six(model, policy)[0]


@pytest.mark.parametrize("method", METHODS)
def test_prompts_from_the_prefix_cache(
    tiny_model: Path, method: dict[str, Any]
) -> None:
    """Prompts of whole superblocks and one token more leave one token to compute.

    vLLM adds drafts of padding to such a request where others run, up to the event.
    """
    values = {"policy": "tova", **VALUES, "budget": 96, "recent": 0, "interval": 8}
    cached = [repetitive(seed, 3 * BLOCK + 1) for seed in range(3)]
    late = [Job(f"c{n}", prompt, 40, 30) for n, prompt in enumerate(cached)]
    jobs = [*jobs_of((40,), 75), *late]
    plain, _ = run(tiny_model, values, jobs)
    sizes = {"enable_prefix_caching": True, "speculative_config": method}
    (first, again), (_, hits) = serve_again(tiny_model, values, jobs, **sizes)
    assert first.tokens == again.tokens == plain.tokens
    assert all(hits[f"c{number}"] >= 2 * BLOCK for number in range(3))


@pytest.mark.parametrize("kind", ["gemma3", "gemma4_31b", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("policy", ["ams-tova", "snapkv"])
def test_beside_windows(folders, tmp_path: Path, kind: str, policy: str) -> None:
    """And learned sinks, or latents, where requests wait for room."""
    values = {"policy": policy, **VALUES, "budget": 160, "prefill_interval": 384}
    jobs, drafting = jobs_of((40, 150, 300, 600)), {"speculative_config": SPECULATION}
    sizes = {"max_num_batched_tokens": 96, "max_model_len": 832}
    sizes["enable_prefix_caching"] = True
    sizes |= SETTINGS.get(kind, {})
    plain, _ = run(folders(kind), values, jobs, trace=tmp_path / "plain", **sizes)
    sizes |= {"num_blocks": POOLS.get(kind, 60), "trace": tmp_path / "drafts"}
    found, drafts = run(folders(kind), values, jobs, **drafting, **sizes)
    found.check_kept(plain)
    assert not found.preemptions and found.counters["events"] > 8
    assert sum(drafts.accepted.values()) > 5 and drafts.count > 400


POOLS = {"gemma3": 96, "deepseek_v3": 104}
ADMISSIONS = ("wgkv", "wgkv+snapkv", "kvzap", "duo")
DECIDING = [
    (ADMISSIONS, False, SPECULATION),
    # A server has at most one word that decides in the forward pass.
    (("wgkv", "wgkv+snapkv"), True, SPECULATION),
    (("kvzap",), True, SPECULATION),
    (("dms",), True, SPECULATION),
    pytest.param(("wgkv",), False, SUFFIX, marks=needs_suffix, id="wgkv-suffix"),
    pytest.param(("dms",), True, SUFFIX, marks=needs_suffix, id="dms-suffix"),
]
if every_name:
    DECIDING.append((("dms",), False, SPECULATION))


def with_files(names: tuple[str, ...], model: Path, folder: Path) -> dict[str, Any]:
    """Return a server that offers admissions, whose files are random."""
    values = {"policy": names[0], "allow": list(names[1:]), **VALUES}
    if "dms" in names:
        say_dms(model, dms_window_size=32, dms_cr=2)
    others = [name for name in names if name != "dms"]
    options = options_with_files(others, folder, Heads(query=4, kv=2))
    return {**values, "recent": 32, "sinks": 4, "policy_config": options}


@pytest.mark.parametrize(("names", "is_exact", "method"), DECIDING)
def test_admissions_decide_as_without_drafts(
    tmp_path: Path, names: tuple[str, ...], is_exact: bool, method: dict[str, Any]
) -> None:
    """Where a draft was wrong, the right token decides in its place."""
    model = make_tiny_model(tmp_path / "model")
    values = with_files(names, model, tmp_path)
    if is_exact:
        values["policy_config"]["exact"] = True
    jobs = [
        replace(job, name=f"{name} {job.name}", extra_args={"kv_policy": name})
        for name in names
        for job in jobs_of((40, 150, 300), 80)
    ]
    plain, _ = run(model, values, jobs, trace=tmp_path / "plain")
    drafting = {"trace": tmp_path / "drafts", "speculative_config": method}
    found, drafts = run(model, values, jobs, **drafting)
    assert 0.03 < drafts.share < 0.9
    found.check_kept(plain)
    for job in jobs:
        assert len(found.results[job.name].events) > 1 or len(job.prompt) == 40
