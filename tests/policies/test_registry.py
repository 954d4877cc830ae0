"""The grammar of policy names and their options."""

import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any, get_args

import pytest

from support.option_limits import limits_of
from vllm_kvpolicy.config import KVPolicyConfig
from vllm_kvpolicy.policies import compose as factory
from vllm_kvpolicy.policies import names as registry
from vllm_kvpolicy.policies.allocators.ams import AMSAllocator
from vllm_kvpolicy.policies.base import Policy
from vllm_kvpolicy.policies.compose import ComposedPolicy, KeepAll
from vllm_kvpolicy.policies.names import (
    ADMISSIONS,
    ALLOCATORS,
    SCORERS,
    SELECTIONS,
    TESTS,
)
from vllm_kvpolicy.policies.options import kind_of, valid_range
from vllm_kvpolicy.policies.scorers.snapkv import SnapKVScorer
from vllm_kvpolicy.policies.selections.quest import Quest
from vllm_kvpolicy.policies.testing import MovementPolicy
from vllm_kvpolicy.policies.words import Word

# The words that the documentation promises; others may be added without a change here.
SCORER_WORDS = (
    "streaming tova snapkv snapmax h2o expected keydiff knorm lagkv rpc rkv "
    "triattention qfilter epikv random"
)
ALLOCATOR_WORDS = "ams adakv pyramid chunk hard trim strat"


def test_words() -> None:
    assert set(SCORER_WORDS.split()) <= set(SCORERS)
    assert {"", *ALLOCATOR_WORDS.split()} <= set(ALLOCATORS)
    assert set(TESTS) == {"identity", "holes"}
    words = [*SCORERS, *ALLOCATORS, *TESTS]
    assert len(words) == len(set(words))
    assert not any("-" in word or "+" in word for word in words)


def test_names() -> None:
    names = registry.names()
    assert names[: len(SCORERS)] == list(SCORERS)
    assert names[-2:] == list(TESTS)
    assert len(set(names)) == len(names)
    refused = sum(len(word.refuses) for word in ALLOCATORS.values())
    assert len(names) == len(SCORERS) * len(ALLOCATORS) - refused + 2
    assert {"ams-tova", "hard-snapkv", "adakv-keydiff", "pyramid-rpc"} < set(names)


@pytest.mark.parametrize("name", registry.names())
def test_every_name_parses_and_builds(name: str, build: Callable[..., Policy]) -> None:
    info = registry.parse(name)
    assert info.name == name
    assert info.is_test == info.keeps_all == (name in TESTS)
    assert info.pins_prompt == name.endswith(("rpc", "epikv"))
    policy = build(name)
    assert callable(policy.decide)
    assert isinstance(policy, MovementPolicy) == (name in TESTS)


def test_an_option_says_whether_the_text_decides_how_much_is_kept(
    build: Callable[..., Policy],
) -> None:
    for mode in ("fixed", "dynamic"):
        found = build("hard-snapkv", {"hard_mode": mode}).dynamic
        assert found == (mode == "dynamic")
    assert build("trim-snapmax").dynamic and not build("ams-snapkv").dynamic


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *[(name, {}) for name in registry.names() if name not in TESTS],
        ("hard-tova", {"hard_order": "attention"}),
        ("hard-tova", {"hard_order": "attention", "hard_merge": True}),
    ],
)
def test_who_reads_queries_beside_the_usage_says_so(
    name: str, options: dict[str, Any], build: Callable[..., Policy]
) -> None:
    policy = build(name, options)
    assert isinstance(policy, ComposedPolicy)
    needs = policy.scorer.needs, policy.allocator.needs
    reads = any(part.mass or part.window_tokens and not part.usage for part in needs)
    words = registry.parse(name)
    assert any(word.weighs_itself for word in words.parts) or not reads
    assert any(row.rotates for row in words.parts) == policy.needs.rope


ROWS = {**SCORERS, **ALLOCATORS, **ADMISSIONS, **SELECTIONS}
ROWS |= {name: registry.parse(name).parts[0] for name in TESTS}


@pytest.mark.parametrize("row", ROWS.values(), ids=list(ROWS))
def test_every_row_names_what_its_options_build(row: type[Word]) -> None:
    fields = row.Options.model_fields
    if row.build.__func__ is Word.build.__func__:
        assert inspect.signature(row).bind(row.Options)
    window = row.query_window
    assert isinstance(window, int) or window in fields
    assert row.summary and row.source
    for field in fields.values():
        assert field.description and valid_range(field)
    required = {key: "file" for key, field in fields.items() if field.is_required()}
    assert row.Options(**required).model_dump().keys() == fields.keys()
    words = ALLOCATORS if row in ADMISSIONS.values() else SCORERS
    assert set(row.refuses) <= set(words)


@pytest.mark.parametrize("row", ROWS.values(), ids=list(ROWS))
def test_every_number_has_a_largest_value(row: type[Word]) -> None:
    """Beyond 64 bits a kernel would end the engine at its first event."""
    fields = row.Options.model_fields
    given = {key: "file" for key, field in fields.items() if field.is_required()}
    for key, field in fields.items():
        if kind_of(field) not in (int, float):
            continue
        assert abs(limits_of(field)[1]) < 2**33
        for value in (10**20, -(10**20)):
            number = kind_of(field)(value)
            with pytest.raises(ValueError, match=f"^{key}: got .*, expected "):
                row.Options(**{**given, key: number})


def test_every_admission_with_own_models_says_what_vllm_must_know() -> None:
    for name, path in registry.architectures().items():
        module, _, model = path.partition(":")
        assert getattr(import_module(module), model).__name__ == name
    for admission in registry.OWN_MODELS:
        found = registry.models_of(admission)
        assert found.refuse_plain and found.missing_architecture


def test_words_that_share_an_option_agree_on_it() -> None:
    by_name: dict[str, Any] = {}
    for row in ROWS.values():
        for key, field in row.Options.model_fields.items():
            if key == "preset":  # values of each word's own
                assert get_args(field.annotation) == (*row.presets,)
            else:
                assert repr(by_name.setdefault(key, field)) == repr(field)


def test_options_are_plain_data_that_cannot_change() -> None:
    found = registry.resolve(
        registry.parse("ams-snapkv"), {"window": 8, "min_quota": 3}
    )
    options = found.own[SnapKVScorer]
    assert options.model_dump() == {"window": 8, "pool_kernel": 5}
    with pytest.raises(ValueError, match="frozen"):
        options.window = 9


@pytest.mark.parametrize(
    "name",
    [
        "", "-", "-tova", "ams", "ams-", "tova-ams", "ams-ams-tova", "AMS-TOVA",
        " tova", "none", "H2O", "tova+wgkv", "ams-adakv-tova", "quest+wgkv",
        "quest+tova", "quest+quest", "wgkv+quest+quest", "tova+quest+quest", "+quest",
        "quest+", "tova-quest", "quest-tova", "ams+quest", "identity+quest",
        "wgkv-tova",
        "ams-identity", "ams_tova", None, 3, "wgkv+", "wgkv+wgkv", "wgkv+identity",
    ],
)  # fmt: skip
def test_unknown_names(name: object) -> None:
    with pytest.raises(ValueError) as error:
        registry.parse(name)
    text = str(error.value)
    assert text.startswith(f"kv_policy: got {name!r}")
    assert text.endswith(f", expected {registry.grammar()}")


def test_an_admission_adds_its_options_and_drops_the_budget_alone() -> None:
    alone, both = registry.parse("wgkv"), registry.parse("wgkv+ams-snapkv")
    eviction = registry.parse("ams-snapkv")
    assert alone.keeps_all and not both.keeps_all
    assert alone.is_ragged({}) and both.is_ragged({}) and not eviction.is_ragged({})
    assert both.parts == alone.parts + eviction.parts
    assert list(both.options) == [*alone.options, *eviction.options]
    assert both.window_tokens({}) == eviction.window_tokens({}) > 0
    assert not (alone.is_test or both.is_test)
    with pytest.raises(ValueError, match="wgkv_gates"):
        registry.resolve(both, {})


@pytest.mark.parametrize(
    "front", ["tova", "ams-snapkv", "adakv-keydiff", "epikv", "wgkv", "wgkv+rkv"]
)
def test_a_selection_stands_behind_what_it_reads(front: str) -> None:
    before, behind = registry.parse(front), registry.parse(f"{front}+quest")
    assert behind.name == f"{front}+quest" and behind.is_ragged({})
    assert before.selection is None and behind.selection is not None
    assert behind.parts == (*before.parts, SELECTIONS["quest"])
    same = "whole", "scorer", "allocator", "admission", "pins_prompt"
    same += "keeps_all", "is_unbounded", "fixed_keys", "placement"
    for name in same:
        assert getattr(behind, name) == getattr(before, name), name
    assert not behind.is_test


def test_a_selection_alone_keeps_everything() -> None:
    info = registry.parse("quest")
    assert (
        info.keeps_all and info.is_unbounded and info.is_ragged({}) and not info.is_test
    )
    assert tuple(info.fixed_keys) == ("budget",) and info.window_tokens({}) == 0
    assert registry.resolve(info, {}).options == {"quest_budget": 1024}
    assert isinstance(factory.build("quest", {"quest_budget": 7}), KeepAll)
    info = registry.parse("ams-tova+quest")
    behind = registry.resolve(info, {"quest_budget": 64}).build(Quest)
    assert isinstance(behind, Quest) and behind.options.quest_budget == 64
    with pytest.raises(ValueError, match="quest_budget: got 0, expected an integer"):
        factory.build("quest", {"quest_budget": 0})


def test_grammar_names_every_word_and_every_refusal() -> None:
    text = registry.grammar()
    words = set(re.findall(r"[\w-]+", text))
    assert {*SCORERS, *ALLOCATORS, *SELECTIONS, *TESTS} - {""} < words
    assert "adakv-tova" in text and "ams-tova" not in text and "\n" not in text


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        *[
            (f"{allocator}-{scorer}", reason)
            for allocator, word in ALLOCATORS.items()
            for scorer, reason in word.refuses.items()
        ],
        # They count what is held.
        *[
            (f"{admission}+{allocator}-snapkv", "")
            for admission in ("wgkv", "kvzap")
            for allocator in sorted({*ALLOCATORS} - {"", "ams", "trim"})
        ],
    ],
)
def test_refused_combinations_give_their_reason(name: str, reason: str) -> None:
    with pytest.raises(
        ValueError, match=re.escape(f"got '{name}', refused because {reason}")
    ):
        registry.parse(name)


def test_a_name_imports_its_own_words_alone() -> None:
    code = (
        "import sys; from vllm_kvpolicy.policies import names as registry;"
        "assert 'tova' in registry.grammar(in_full=False);"
        "assert not {'torch', 'vllm', 'numpy'} & set(sys.modules);"
        "registry.resolve(registry.parse('ams-tova'), {});"
        "rooms = ('scorers', 'allocators', 'admissions', 'selections');"
        "found = {name.partition('.policies.')[2] for name in sys.modules};"
        "found = {name for name in found if '.' in name and '._' not in name};"
        "found = {name for name in found if name.startswith(rooms)};"
        "assert found == {'scorers.tova', 'allocators.ams'}, found"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def resolved(name: str, **options: object) -> dict[str, object]:
    return registry.resolve(registry.parse(name), options).options


def test_defaults_equal_the_default_preset() -> None:
    for name in ("ams-tova", "ams-snapkv"):
        assert resolved(name) == resolved(name, preset="default")
        options = registry.parse(name).options
        assert resolved(name) == {k: field.default for k, field in options.items()}


def test_explicit_options_override_presets() -> None:
    assert resolved("ams-tova", preset="paper")["window"] == 128
    assert resolved("ams-tova", preset="paper", window=64)["window"] == 64
    capped = resolved("hard-rkv", preset="paper", window=64)
    assert (capped["hard_mode"], capped["hard_upper"], capped["window"]) == (
        "dynamic",
        1,
        64,
    )
    code = resolved("ams-snapkv", preset="code", min_quota=2)
    assert (code["segment_mass"], code["min_quota"]) == (0.02, 2)


@pytest.mark.parametrize(
    "name", [*registry.names(), "local", "quest", "tova+quest", "ams-rkv+quest"]
)
def test_the_configuration_knows_which_queries_the_policy_reads(
    name: str,
    build: Callable[..., Policy],
    scorer_options: Callable[..., dict[str, object]],
) -> None:
    """The scheduler lends superblocks for the one, the worker reads the other."""
    config = KVPolicyConfig(name, options=scorer_options(name))
    assert config.resolved().window_tokens == build(name).needs.window_tokens


def test_window_follows_options() -> None:
    for name, options, want in [
        ("streaming", {}, 0),
        ("tova", {}, 1),
        ("snapkv", {"window": 64}, 64),
        ("ams-tova", {"preset": "paper"}, 128),
        ("ams-snapkv", {"preset": "paper", "window": 48}, 48),
        ("h2o", {"window": 16}, 16),
        ("rpc", {"rpc_window": 16}, 16),
        ("expected", {}, 128),
        ("ams-expected", {"expected_window": 20}, 32),
        ("ams-rkv", {"rkv_window": 40}, 40),
    ]:
        info = registry.parse(name)
        assert info.window_tokens(registry.resolve(info, options).options) == want
        assert factory.build(name, options).needs.window_tokens == want


def test_options_reach_the_parts() -> None:
    policy = factory.build(
        "ams-snapkv",
        {"preset": "code", "pool_kernel": 7, "suffix_pad": "mean", "parity": True},
    )
    assert isinstance(policy.allocator, AMSAllocator)
    assert isinstance(policy.scorer, SnapKVScorer)
    config = policy.allocator.options
    assert config.parity and config.max_segment == 1024
    assert (config.pool_kernel, config.suffix_pad) == (7, "mean")
    assert policy.scorer.options.pool_kernel == 7


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        (
            "tova",
            {"window": 4},
            "got the unknown key 'window', expected a key of 'tova' (none)",
        ),
        ("snapkv", {"preset": "code"}, "(window, pool_kernel)"),
        ("ams-tova", {"sinks": 4}, "got the unknown key 'sinks'"),
        ("ams-tova", {"preset": "best"}, "one of default, paper, code"),
        ("ams-tova", {"segment_mass": 1.0}, "a number in [0.001, 1)"),
        ("ams-tova", {"min_segment": True}, "min_segment: got True"),
        ("ams-tova", {"min_segment": 300}, "at least min_segment"),
        ("ams-tova", {"max_segment": 20, "preset": "code"}, "max_segment: got 20"),
        ("ams-tova", {"pool_kernel": 4}, "an odd integer in [1, 255]"),
        ("ams-tova", {"suffix_pad": "global"}, "one of max, mean, none"),
        ("ams-tova", {"parity": 1}, "true or false"),
        ("ams-tova", {"ema_mix": float("nan")}, "ema_mix: got nan"),
        ("lagkv", {"lag": 1}, "lag: got 1, expected an integer in [2, 16777216]"),
        ("random", {"seed": 2**32}, "seed: got 4294967296"),
        ("triattention", {}, "calibration: got None"),
    ],
)
def test_bad_options(name: str, options: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError) as error:
        registry.resolve(registry.parse(name), options)
    assert text in str(error.value)
