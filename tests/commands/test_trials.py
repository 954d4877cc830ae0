"""What starts call untested on a GPU, and what `verify --feature` remembers of it."""

import json
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from support.engine_configs import Overlay, engine_args
from vllm_kvpolicy import __main__ as command
from vllm_kvpolicy import compat
from vllm_kvpolicy.api import evidence
from vllm_kvpolicy.commands import judge, trials, verify, verify_engine
from vllm_kvpolicy.commands.judge import FAILED, PASSED, Answer, Check


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder; returns the file in it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "vllm-kvpolicy" / evidence.FILE


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "platform_name", lambda: "cuda")
    monkeypatch.setattr(compat, "gpu_capability", lambda: (9, 0))
    monkeypatch.setattr(compat, "device_name", lambda: "a card")


TEXT, WINDOWS = "model_config.hf_text_config", list(trials.KINDS)
TWO_SIZES = {"layer_types": WINDOWS, "sliding_window": 48, "swa_head_dim": 64}
# What a server has that uses a feature.
USES: dict[str, dict[str, Any]] = {
    "fp8": {"cache_config.cache_dtype": "fp8_e4m3"},
    "windows": {f"{TEXT}.layer_types": WINDOWS, f"{TEXT}.sliding_window": 48},
    "heads": {TEXT: SimpleNamespace(**TWO_SIZES)},
    "states": {f"{TEXT}.layer_types": ["conv", "full_attention"]},
    "latents": {"model_config.use_mla": True},
    "sinks": {f"{TEXT}.model_type": "gpt_oss"},
    "ngram": {"speculative_config": SimpleNamespace(method="ngram")},
    "suffix": {"speculative_config": SimpleNamespace(method="suffix")},
    "flashinfer": {"attention_config.backend": SimpleNamespace(name="FLASHINFER")},
    "sleep": {"model_config.enable_sleep_mode": True},
    "lora": {"lora_config": object()},
    "ranks": {"parallel_config.tensor_parallel_size": 2},
}


def test_each_feature_has_its_trial():
    names = [feature.name for feature in evidence.FEATURES]
    assert sorted(names) == sorted(["card", *USES])
    tried = {feature.name for feature in evidence.FEATURES if feature.has_trial}
    assert tried == {*trials.TRIALS}


@pytest.mark.parametrize("name", USES)
def test_a_feature_is_untested_on_a_gpu_until_it_has_passed_there(
    name, hopper, policy_config, policy_log, monkeypatch
):
    used = Overlay(policy_config, USES[name])
    assert [feature.name for feature in evidence.untested(used)] == [name]
    evidence.tell_untested(used)
    (told,) = policy_log.messages
    check = f"; to check it, run `vllm-kvpolicy verify --feature {name}`"
    assert told.endswith(check) == (name not in ("lora", "ranks"))
    evidence.remember(name)
    assert evidence.untested(used) == []
    monkeypatch.setattr(compat, "device_name", lambda: "another card")
    assert [feature.name for feature in evidence.untested(used)] == [name]


def test_a_plain_server_uses_nothing_untested(hopper, policy_config, monkeypatch):
    assert evidence.untested(policy_config) == []
    monkeypatch.setattr(compat, "gpu_capability", lambda: (10, 0))
    assert [feature.name for feature in evidence.untested(policy_config)] == ["card"]
    monkeypatch.setattr(compat, "platform_name", lambda: "cpu")
    assert evidence.untested(Overlay(policy_config, USES["fp8"])) == []


def test_what_is_remembered_adds_up_and_survives_a_broken_file(cache):
    for name in ("ngram", "fp8", "fp8"):
        evidence.remember(name)
    assert evidence.verified() == {"fp8", "ngram"}
    (names,) = json.loads(cache.read_text()).values()
    assert names == ["fp8", "ngram"]
    for broken in ("{", "[]", json.dumps({evidence._here(): None})):
        cache.write_text(broken)
        assert evidence.verified() == set()


@pytest.mark.parametrize(
    ("platform", "name", "dtypes"),
    [
        ("cpu", "heads", ["float32"]),
        ("cuda", "windows", ["float32", "bfloat16"]),
        ("cuda", "flashinfer", ["bfloat16"]),
    ],
)
def test_on_a_gpu_features_run_as_servers_run_them_too(
    platform, name, dtypes, monkeypatch
):
    seen = []

    def checks(*given: Any) -> Iterator[Check]:
        seen.append(given)
        yield Check("moved", PASSED, "x")

    monkeypatch.setattr(compat, "platform_name", lambda: platform)
    monkeypatch.setattr(verify_engine, "checks", checks)
    monkeypatch.setattr(os, "environ", {**os.environ})
    assert command.main(["verify", "--feature", name]) == 0
    assert os.environ["TRITON_F32_DEFAULT"] == "ieee"
    assert [given[1] for given in seen] == dtypes
    for given in seen:
        is_eager = "enforce_eager" not in given[4]
        assert is_eager == (given[1] == "float32")


def test_a_start_tells_what_it_uses(tiny_model, policy_log, monkeypatch):
    monkeypatch.setattr(evidence, "untested", lambda config: evidence.FEATURES[1:2])
    policy = {"kv_policy": {"policy": "tova"}}
    engine_args(tiny_model, additional_config=policy).create_engine_config()
    assert any("untested on this device: FP8" in m for m in policy_log.messages)


@pytest.mark.parametrize(("result", "remembers"), [(PASSED, True), (FAILED, False)])
def test_only_what_passes_is_remembered(result, remembers, monkeypatch):
    found = [Check("moved", PASSED, "x"), Check("dropped", result, "y")]
    monkeypatch.setattr(verify_engine, "trial_checks", lambda *_: iter(found))
    assert command.main(["verify", "--feature", "windows"]) == (not remembers)
    assert evidence.verified() == ({"windows"} if remembers else set())


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "expected a MODEL, a URL or --feature, one of them"),
        (["x", "--feature", "fp8"], "expected a MODEL, a URL or --feature"),
        (["--feature", "fp9"], "got fp9, expected on a CPU one of fp8, windows, heads"),
        (["--feature", "ngram"], "got ngram, expected on a CPU one of fp8, windows,"),
        (["--feature", "fp8", "--dtype", "bfloat16"], "leave them out with --feature"),
        (["--feature", "fp8", "--kv-policy", "tova"], "leave them out with --feature"),
    ],
)
def test_a_wrong_command_line(words, told, capsys):
    try:
        status = command.main(["verify", *words])
    except SystemExit as stop:
        status = stop.code
    assert status == 2 and told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("tokens", "level", "result"),
    [
        ((1, 2, 9), 0.5, PASSED),
        ((1, 2, 9), 0.2, FAILED),
        ((1, 8, 3), 0.5, FAILED),
        ((1, 2, 7), 0.5, FAILED),  # anything but the second best
        ((1, 2), 0.5, FAILED),
    ],
)
def test_level_tokens_may_change_places(tokens, level, result):
    stock = [Answer((1, 2, 3), close=((2.0, 7), (1.0, 8), (0.3, 9)))]
    found = [Answer(tokens)]
    grown = {"events": 1.0}
    check = judge.same_tokens("x", stock, found, grown, has_events=True, level=level)
    assert check.result == result
    assert judge.widest_lead(stock, stock) == 0
    assert judge.num_equal(stock, stock) == 3
    assert judge.widest_lead([Answer((1, 2))], [Answer((1, 3))]) == float("inf")


@pytest.mark.parametrize(("steps", "result"), [(5, PASSED), (6, FAILED)])
def test_drafts_that_nobody_accepts(steps, result):
    answers = [Answer((1, 2, 3)), Answer((4, 5, 6))]
    grown = {"request_steps": float(steps)}
    assert judge.drafts_are_taken(answers, grown).result == result


@pytest.mark.parametrize(("level", "result"), [(0.13, PASSED), (4.0, FAILED)])
def test_stock_that_does_not_agree_with_itself(level, result):
    assert judge.is_steady(level, verify_engine.MOST_LEVEL).result == result


@pytest.mark.parametrize(
    ("found", "result"),
    [
        (Answer((3, 4), close=((1.0, 5), (1.0, 6))), PASSED),
        (Answer((5, 4), close=((1.0, 3), (1.0, 6))), PASSED),
        (Answer((6, 4), close=((1.0, 3), (1.0, 6))), FAILED),
        (Answer((3, 4), close=((1.0, 5), (float("nan"), 6))), FAILED),
    ],
)
def test_answers_of_noise_do_not_begin_as_stocks(found, result):
    stock = [Answer((3, 9), close=((0.5, 5), (0.1, 4)))]
    assert judge.begin_alike(stock, [found]).result == result


def test_who_slept_reads_nothing_of_before(tmp_path, monkeypatch):
    """A pool that was given back holds anything; sleep empties the prefix cache."""
    asked = verify._config({})
    sizes = verify_engine.Sizes(asked.budget_tokens + asked.interval_tokens)
    settings = {"skip_tokenizer_init": True, "enable_prefix_caching": True}
    made = str(trials.make_qwen3(tmp_path)), verify_engine.EXACT, sizes
    seen = verify_engine.Asked(True, True)
    with closing(verify_engine.Engine(*made, None, settings)) as engine:
        assert {check.result for check in seen.ask(engine)} <= {PASSED}
    forgets = True

    def nap(engine: verify_engine.Engine) -> None:
        core = engine._engine.engine_core.engine_core
        if forgets:
            core.reset_prefix_cache()
        for cache in core.model_executor.driver_worker.worker.model_runner.kv_caches:
            cache.normal_()

    monkeypatch.setattr(verify_engine.Engine, "can_sleep", True)
    monkeypatch.setattr(verify_engine.Engine, "nap", nap)
    (_, mover), *_ = verify_engine._engines(asked, sizes, verify_engine.OF_MODEL)[1]
    with closing(verify_engine.Engine(*made, mover, settings)) as engine:
        for forgets in (True, False):
            checks = list(verify_engine._mover(engine, "x", seen, drafts=False))
            (after,) = [each for each in checks if "after sleep" in each.name]
            assert after.result == (PASSED if forgets else FAILED), checks
