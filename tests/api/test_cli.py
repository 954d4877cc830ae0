"""From a command line to the plain form, and how it merges with what is there."""

import argparse

import pytest

from vllm_kvpolicy.api import cli
from vllm_kvpolicy.config import KVPolicyConfig

ALL_FLAGS = [
    *("--kv-policy", "ams-tova"),
    *("--kv-budget", "128"),
    *("--kv-interval", "64"),
    *("--kv-recent", "16"),
    *("--kv-sinks", "2"),
    *("--kv-events", "pressure"),
    *("--kv-policy-config", '{"preset": "code", "live_text": true}'),
    "--kv-live",
]


def parse(*words):
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    return parser.parse_args(list(words))


def test_every_flag_reaches_the_configuration():
    given = cli.given_values(vars(parse(*ALL_FLAGS)))
    config = KVPolicyConfig.from_dict(given)
    assert config.policy == "ams-tova"
    assert (config.budget_tokens, config.interval_tokens) == (128, 64)
    assert (config.recent_tokens, config.sink_tokens) == (16, 2)
    assert (config.events, config.is_auto) == ("pressure", False)
    assert config.resolved().options["segment_mass"] == 0.02  # of the preset `code`
    assert config.live and config.live_text
    assert KVPolicyConfig.from_dict(config.to_dict()) == config


def test_the_budget_may_be_the_pools_share():
    given = cli.given_values(vars(parse(*ALL_FLAGS, "--kv-budget", "auto")))
    assert given["budget"] == "auto"
    assert KVPolicyConfig.from_dict(given).is_auto


@pytest.mark.parametrize(
    ("words", "given"), [((), {}), (("--kv-sinks", "0"), {"sinks": 0})]
)
def test_nothing_is_nothing_and_zero_is_given(words, given):
    assert cli.given_values(vars(parse(*words))) == given


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--kv-policy", "best"), "kv_policy: got 'best', expected [ADMISSION+]"),
        (("--kv-budget", "many"), "kv_budget: got 'many', expected an integer >= 1 or"),
        (("--kv-budget", "12.5"), "kv_budget: got '12.5', expected an integer >= 1"),
        (("--kv-interval", "0"), "kv_interval: got 0, expected an integer >= 1"),
        (("--kv-sinks", "-1"), "kv_sinks: got -1, expected an integer >= 0"),
        (("--kv-policy-config", "[1]"), "kv_policy_config: got '[1]', expected a JSON"),
        (("--kv-policy-config", "{"), "kv_policy_config: got '{', expected a JSON"),
        (("--kv-policy-config", '{"a":' * 99999), '{"a":\', expected a JSON object'),
        (("--kv-budget", "9" * 30), "99999, expected at most 2147483647"),
    ],
)
def test_bad_flags_are_refused_while_parsing(words, message, capsys):
    with pytest.raises(SystemExit):
        parse(*words)
    said = capsys.readouterr().err
    assert message in said and len(said) < 20_000


def test_help_names_every_flag_policy_and_default(capsys):
    with pytest.raises(SystemExit):
        parse("--help")
    text = capsys.readouterr().out
    for word in (*ALL_FLAGS[::2], "ams", "h2o", "(default: 2048)", "KVPolicy"):
        assert word in text, word


def test_each_flag_is_a_variable_too():
    values = {"POLICY": "ams-tova", "BUDGET": "auto", "INTERVAL": "64", "LIVE": "1"}
    values |= {"EVENTS": "pressure", "PIN": "128", "RECENT": "", "SINKS": "0"}
    values |= {"CEILING": "900", "POLICY_CONFIG": '{"segments": 2}'}
    given = {f"VLLM_KV_{name}": text for name, text in values.items()}
    found = cli.from_environment({**given, "VLLM_KV_CACHE_LAYOUT": "NHD"})
    assert found == {
        **{"policy": "ams-tova", "budget": "auto", "interval": 64, "live": True},
        **{"events": "pressure", "pin": 128, "sinks": 0, "ceiling": 900},
        "policy_config": {"segments": 2},
    }
    assert found.keys() == set(cli.KEYS) - {"recent"}
    assert cli.from_environment({**given, "VLLM_KV_POLICY": "none"}) == {}
    assert cli.from_environment({**given, "VLLM_KV_LIVE": "0"}).get("live") is None


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("BUDGET", "many", "kv_budget: got 'many', expected an integer"),
        ("POLICY", "tofa", "'tofa'"),
        ("EVENTS", "never", "invalid choice: 'never'"),
        ("LIVE", "yes", "got 'yes', expected 0 or 1"),
    ],
)
def test_bad_variables_are_named(name, text, said):
    with pytest.raises(ValueError, match=f"^VLLM_KV_{name}: .*{said}"):
        cli.from_environment({f"VLLM_KV_{name}": text})


def test_flags_and_additional_config_win_over_variables():
    before = {"other": 1, "kv_policy": {"policy": "tova", "budget": 256}}
    under = {"policy": "h2o", "budget": 512, "interval": 64}
    merged = cli.merge(before, {"budget": 128}, under)
    found = {"policy": "tova", "budget": 128, "interval": 64}
    assert merged == {"other": 1, "kv_policy": found}
    assert before["kv_policy"]["budget"] == 256
    assert cli.merge(None, {}, under) == {"kv_policy": under}
    assert cli.merge(None, {}, {"budget": 512}) is None  # nobody names a policy


def test_without_flags_additional_config_is_the_same_object():
    before = {"other": 1}
    assert cli.merge(before, {}) is before


@pytest.mark.parametrize("before", [{"kv_policy": "tova"}, object()])
def test_additional_config_must_be_able_to_hold_values(before):
    message = "additional_config: got .*expected a mapping"
    with pytest.raises(ValueError, match=message):
        cli.merge(before, {"policy": "tova"})
