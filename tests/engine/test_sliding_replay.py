"""Beside windows and states, answers follow from the survivors that were recorded.

The replay oracle, with the models of transformers as decoders: layers of full attention
see the recorded survivors, the others their window, and gpt-oss has learned sinks, as
windows of MiMo-V2 have. And the selection oracle, which recomputes these survivors.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from support.engine.helpers import BLOCK, Result, config_of, one_job_each, serve
from support.engine.oracle_replay import check_replay
from support.engine.oracle_selection import Report, check_selection
from support.made_hybrids import DOUBLED, LATENTS, SETTINGS
from support.made_sliding import MixedDecoder
from support.sweeps import every_name
from vllm_kvpolicy.config_keys import ALWAYS, PRESSURE

MAMBAS = ("granite4", "nemotron_h", "falcon_h1")
BASE = {"budget": 110, "interval": 56, "prefill_interval": 256, "recent": 40}
COMMON = ["ams-tova", "tova", "snapkv", "streaming", "h2o"]
POLICIES = {
    "gemma3": [*COMMON, "ams-expected", "keydiff", "adakv-snapkv", "local"],
    "gpt_oss": COMMON,
    "lfm2": [*COMMON, "ams-expected", "lagkv"],
    "gemma4_31b": [*COMMON, "ams-expected", "hard-snapkv"],
    "gemma4_e2b": [*COMMON, "keydiff"],
    "mimo_v2": [*COMMON, "ams-expected", "adakv-snapkv"],
    "gemma3n": [*COMMON, "adakv-snapkv"],
    "deepseek_v3": [*COMMON, "strat-tova", "ams-snapkv", "chunk-snapkv"],
    "glm4_lite": [*COMMON[:4], "random"],
    **dict.fromkeys(MAMBAS, COMMON),
}
LARGE = {"budget": 112, "prefill_interval": 384}  # where superblocks have 64 tokens
# Superblocks of pools that are too small for all; with ALWAYS requests preempt.
POOLS = {
    ("gemma3", ALWAYS): 64,
    ("gemma3", PRESSURE): 52,
    ("gpt_oss", ALWAYS): 32,
    ("lfm2", ALWAYS): 40,
    ("lfm2", PRESSURE): 40,
    ("gemma4_31b", ALWAYS): 21,
    ("gemma4_31b", PRESSURE): 30,
    ("gemma4_e2b", ALWAYS): 40,
    ("mimo_v2", ALWAYS): 21,
    ("gemma3n", ALWAYS): 40,
    ("deepseek_v3", ALWAYS): 84,
    ("deepseek_v3", PRESSURE): 84,
    ("glm4_lite", ALWAYS): 48,
    **{(name, ALWAYS): 200 for name in MAMBAS},
}
# Of superblocks of 64 and 96 tokens, with room for all.
MAMBA = {"budget": 140, "interval": 40, "prefill_interval": 384}
SIZES = {"granite4": 96, "nemotron_h": 64, "falcon_h1": 64}
SIZES |= dict.fromkeys(DOUBLED, 64)
LATENT = {"budget": 112, "interval": 48, "prefill_interval": 160, "recent": 32}
if not every_name:
    del POOLS["lfm2", PRESSURE], POOLS["gemma4_31b", PRESSURE]
# All are served together; of two that need little of a model gemma3's are judged.
SIMPLE = () if every_name else ("tova", "streaming")
CASES = [
    (*pool, policy)
    for pool in POOLS
    for policy in POLICIES[pool[0]]
    if pool[0] == "gemma3" or policy not in SIMPLE
]
# What the selection oracle knows, on heads of equal lengths.
SELECTED = ("ams-tova", "tova", "snapkv", "streaming")
Decoders = Callable[[str], MixedDecoder]


def values_of(model: str, events: str) -> dict[str, Any]:
    """Return the configuration of a server with all policies of a model."""
    names = POLICIES[model]
    values = {"policy": names[0], "allow": names, "events": events, **BASE}
    values |= LARGE if model in DOUBLED else MAMBA if model in SIZES else {}
    values |= LATENT if model in LATENTS else {}
    if "ams-expected" in names:
        values["policy_config"] = {"expected_window": 48}
    return values


@pytest.fixture(scope="module")
def served(folders, tmp_path_factory: pytest.TempPathFactory):
    """Return what serves one request of each policy together, once."""

    @cache
    def run(model: str, events: str) -> dict[str, Result]:
        names, values = POLICIES[model], values_of(model, events)
        jobs = one_job_each(names, (37, 180, 300), 150, seed=4000)
        changes = {"max_num_batched_tokens": 96, "max_model_len": 640}
        changes |= {"num_blocks": POOLS[model, events], "foresees": events == PRESSURE}
        # What latent vectors need on a CPU, a policy sets by itself.
        changes |= {} if model in LATENTS else SETTINGS.get(model, {})
        folder, trace = folders(model), tmp_path_factory.mktemp("trace")
        found = serve(folder, values, jobs, trace, **changes)
        is_tight = events == ALWAYS and POOLS[model, events] < 100
        assert (found.preemptions > 0) == is_tight
        num_cut = sum(bool(result.events) for result in found.results.values())
        assert num_cut >= (3 if events == ALWAYS else 2)
        return found.results

    return run


@pytest.fixture(scope="module")
def decoders(folders) -> Decoders:
    return cache(lambda model: MixedDecoder(folders(model)))


@pytest.mark.parametrize(("model", "events", "policy"), CASES)
def test_answers_follow_from_the_survivors(
    served, decoders: Decoders, model: str, events: str, policy: str
) -> None:
    result = served(model, events)[policy]
    assert result.events or events == PRESSURE
    print(policy, check_replay(decoders(model), result))


@pytest.mark.parametrize(
    ("model", "events", "policy"), [case for case in CASES if case[2] in SELECTED]
)
def test_survivors_are_those_that_dense_attention_wants(
    served, decoders: Decoders, model: str, events: str, policy: str
) -> None:
    """The selection oracle, with the queries and keys of the same models."""
    result, report = served(model, events)[policy], Report()
    size = 16 if model in LATENTS else SIZES.get(model, BLOCK)
    config = config_of(values_of(model, events)).with_request(
        result.job.extra_args, size
    )
    check_selection(decoders(model), result, config, size, report)
    report.check()
    assert report.decisions or events == PRESSURE
