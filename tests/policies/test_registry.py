"""The grammar of policy names and their options."""

import subprocess
import sys

import pytest

from vllm_kvpolicy.policies import factory, registry
from vllm_kvpolicy.policies.ams import AMSAllocator
from vllm_kvpolicy.policies.snapkv import SnapKVScorer

NAMES = [
    "streaming", "tova", "snapkv", "ams-tova", "ams-snapkv", "identity", "holes",
]  # fmt: skip


def test_names() -> None:
    assert registry.names() == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_name_parses_and_builds(name: str) -> None:
    info = registry.parse(name)
    assert info.name == name
    assert info.is_test == (name in ("identity", "holes"))
    assert not info.protect_prompt
    policy = factory.build(name, {})
    assert callable(policy.decide) and callable(policy.arrange)


@pytest.mark.parametrize(
    "name",
    [
        "", "-", "-tova", "ams", "ams-", "tova-ams", "ams-ams-tova", "AMS-TOVA",
        " tova", "none", "h2o", "quest", "wgkv+tova", "tova+quest", "adakv-tova",
        "ams-identity", "ams_tova", None, 3,
    ],
)  # fmt: skip
def test_unknown_names(name: object) -> None:
    with pytest.raises(ValueError) as error:
        registry.parse(name)
    text = str(error.value)
    assert repr(name) in text and "ams-snapkv" in text and "\n" not in text


def test_refused_combination_gives_its_reason() -> None:
    with pytest.raises(ValueError, match="'ams-streaming' is refused because recency"):
        registry.parse("ams-streaming")


def test_registry_imports_neither_torch_nor_vllm() -> None:
    code = (
        "import sys; from vllm_kvpolicy.policies import registry;"
        "info = registry.parse('ams-tova'); registry.resolve_options(info, {});"
        "assert not {'torch', 'vllm', 'numpy'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def resolved(name: str, **options: object) -> dict[str, object]:
    return registry.resolve_options(registry.parse(name), options)


def test_defaults_equal_the_default_preset() -> None:
    for name in ("ams-tova", "ams-snapkv"):
        assert resolved(name) == resolved(name, preset="default")
        params = registry.parse(name).params
        assert resolved(name) == {param.name: param.default for param in params}


def test_explicit_options_override_presets() -> None:
    assert resolved("ams-tova", preset="paper")["window"] == 128
    assert resolved("ams-tova", preset="paper", window=64)["window"] == 64
    code = resolved("ams-snapkv", preset="code", min_quota=2)
    assert (code["segment_mass"], code["min_quota"]) == (0.02, 2)


def test_window_follows_options() -> None:
    for name, options, want in [
        ("streaming", {}, 0),
        ("tova", {}, 1),
        ("snapkv", {"window": 64}, 64),
        ("ams-tova", {"preset": "paper"}, 128),
        ("ams-snapkv", {"preset": "paper", "window": 48}, 48),
    ]:
        info = registry.parse(name)
        assert info.window_tokens(registry.resolve_options(info, options)) == want
        assert factory.build(name, options).window_tokens == want


def test_options_reach_the_parts() -> None:
    policy = factory.build(
        "ams-snapkv",
        {"preset": "code", "pool_kernel": 7, "suffix_pad": "mean", "parity": True},
    )
    assert isinstance(policy.allocator, AMSAllocator)
    assert isinstance(policy.scorer, SnapKVScorer)
    preset = policy.allocator.preset
    assert preset.config.parity and preset.config.max_segment == 1024
    assert (preset.pool_kernel, preset.suffix_pad) == (7, "mean")
    assert policy.scorer.pool_kernel == 7


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("tova", {"window": 4}, "got 'window', expected keys of 'tova' (none)"),
        ("snapkv", {"preset": "code"}, "(window, pool_kernel)"),
        ("ams-tova", {"sinks": 4}, "got 'sinks'"),
        ("ams-tova", {"segmentmass": 0.1}, "segment_mass, min_segment"),
        ("ams-tova", {"preset": "best"}, "one of default, paper, code"),
        ("ams-tova", {"segment_mass": 1.0}, "a number in [0.001, 1)"),
        ("ams-tova", {"segment_mass": "0.1"}, "segment_mass: got '0.1'"),
        ("ams-tova", {"min_segment": True}, "min_segment: got True"),
        ("ams-tova", {"min_segment": 300}, "at least min_segment"),
        ("ams-tova", {"max_segment": 20, "preset": "code"}, "max_segment: got 20"),
        ("ams-tova", {"window": 0}, "an integer in [1, 1024]"),
        ("ams-tova", {"pool_kernel": 4}, "an odd integer in [1, 255]"),
        ("ams-tova", {"suffix_pad": "global"}, "one of max, mean, none"),
        ("ams-tova", {"parity": 1}, "true or false"),
        ("ams-tova", {"ema_mix": float("nan")}, "ema_mix: got nan"),
        ("ams-tova", {"ema_decay": None}, "ema_decay: got None"),
    ],
)
def test_bad_options(name: str, options: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError) as error:
        registry.resolve_options(registry.parse(name), options)
    assert text in str(error.value)
