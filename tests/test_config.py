"""Every valid key, every bad value, and what one request may change."""

import json
import pickle

import pytest

from vllm_kvpolicy.config import KVPolicyConfig
from vllm_kvpolicy.config_keys import FLAG_KEYS, INTEGER_KEYS, VALID_KEYS
from vllm_kvpolicy.events import LAST_PHASE

BASE = {"policy": "tova", "budget": 128, "interval": 64}
AMS = {**BASE, "policy": "ams-tova"}


def config(**values):
    return KVPolicyConfig.from_dict({**BASE, **values})


def test_defaults_are_those_of_the_design():
    found = KVPolicyConfig.from_dict({"policy": "tova"})
    assert (found.budget_tokens, found.interval_tokens) == (2048, 512)
    assert (found.recent_tokens, found.sink_tokens) == (32, 4)
    assert found.prefill_step(32) == found.prefill_step(16) == 4096
    assert found.pins == "none" and found.pinned_tokens(100) == 0
    assert found.options == {}


def test_plain_form_survives_json_and_pickle():
    built = KVPolicyConfig.from_dict(
        {**AMS, "policy_config": {"preset": "code"}, "pin": "prompt"}
    )
    plain = json.loads(json.dumps(built.to_dict()))
    assert tuple(sorted(plain)) == tuple(sorted(VALID_KEYS))
    assert KVPolicyConfig.from_dict(plain) == built
    assert pickle.loads(pickle.dumps(built)) == built
    assert hash(KVPolicyConfig.from_dict(plain)) == hash(built)


def test_the_pools_share_has_a_number_and_stays_a_word():
    built = config(budget="auto", events="pressure")
    assert (built.budget_tokens, built.is_auto) == (256, True)
    assert built.to_dict()["budget"] == "auto"
    assert KVPolicyConfig.from_dict(built.to_dict()) == built
    known = built.with_budget(640)
    assert (known.budget_tokens, known.to_dict()) == (640, built.to_dict())
    assert not config(budget=256, events="pressure").is_auto
    assert known.with_request({"kv_budget": 512}).budget_tokens == 512


def test_a_share_of_each_request_has_a_number_when_the_request_is_known():
    built = config(budget="25%")
    assert (built.budget_word, built.to_dict()["budget"]) == ("25%", "25%")
    assert KVPolicyConfig.from_dict(built.to_dict()) == built
    for text in ("33.3333333%", "0.00001%", "100%"):
        assert config(budget=text).to_dict()["budget"] == text
    known = built.with_budget(1000)  # of requests of 4,000 tokens
    assert known.to_dict() == built.to_dict()
    for tokens, floor in ((2000, 500), (400, 100), (100, 68), (9000, 1000)):
        request = known.with_request(None, 32, (50, tokens))
        assert request.budget_tokens == floor
    assert known.with_request({}, 32) is known
    assert known.smallest_budget(32) == 68 and config().smallest_budget(32) == 128
    assert known.with_request({"kv_budget": 300}, 32, (0, 2000)).budget_tokens == 300
    # With the request's own recent tokens, which leave room for less.
    asked = {"kv_budget": "1%", "kv_recent": 16}
    assert known.with_request(asked, 32, (0, 2000)).budget_tokens == 4 + 16 + 32
    # Of a server with a number, too, and at most that.
    half = {"kv_budget": "50%"}
    assert config().with_request(half, 32, (9, 180)).budget_tokens == 90
    assert config().with_request(half, 32, (9, 900)).budget_tokens == 128
    assert config().with_request(half, 32).budget_tokens == 128


def test_a_share_is_of_what_is_not_pinned():
    server = config(budget="25%").with_budget(1000)
    pinned = server.with_request({"kv_pin": "prompt"}, 32, (1600, 2000))
    assert pinned.budget_tokens == 100
    assert server.with_request({"kv_pin": 400}, 32, (1600, 2000)).budget_tokens == 400


def test_a_share_says_nothing_to_policies_whose_budget_is_fixed():
    gates = {"allow": ["wgkv"], "wgkv_gates": "gates.safetensors"}
    server = config(budget="25%", policy_config=gates).with_budget(1000)
    own = server.with_request({"kv_policy": "wgkv"}, 32, (100, 800))
    assert own.budget_tokens == 1000
    with pytest.raises(ValueError, match="kv_budget: got '50%', expected none: 'wgkv'"):
        server.with_request({"kv_policy": "wgkv", "kv_budget": "50%"}, 32, (100, 800))


def test_a_share_stays_below_a_ceiling():
    server = config(budget="50%", ceiling=300, events="pressure").with_budget(300)
    assert server.with_request(None, 32, (100, 1000)).budget_tokens == 300
    lower = server.with_request({"kv_ceiling": 200}, 32, (100, 1000))
    assert (lower.budget_tokens, lower.ceiling_tokens) == (200, 200)


@pytest.mark.parametrize("policy", ["tova", "rpc", "tova+quest"])
def test_events_on_call_suit_every_policy_with_a_budget(policy):
    built = config(policy=policy, events="pressure")
    assert (built.events, config(policy=policy)) == ("pressure", built)
    # Requests for a policy without one are not cut, beside others that are.
    config(events="pressure", allow=["quest"])


def test_events_have_positions_where_no_budget_could_be_a_floor_or_a_paper_says_so():
    assert config(policy="quest").events == config(policy="holes").events == "always"
    for preset, events in (("default", "pressure"), ("paper", "always")):
        own = {"interval": 128, "policy_config": {"preset": preset}}
        assert config(policy="ams-tova", **own).events == events
        # Of an allowed policy it says nothing.
        assert config(policy="tova", allow=["ams-tova"], **own).events == "pressure"


def test_none_stands_for_the_default():
    assert config(recent=None).recent_tokens == 32
    assert config(spread_events=None).spread_events
    assert config(policy_config={"spread_events": None}).spread_events


@pytest.mark.parametrize(
    "values", [{"spread_events": False}, {"policy_config": {"spread_events": False}}]
)
def test_without_spread_events_every_request_has_phase_0(values):
    built = config(**values)
    assert not built.spread_events and not built.options
    assert KVPolicyConfig.from_dict(built.to_dict()) == built
    asked = built.with_request({"kv_interval": 40})
    for each in (built, asked):
        assert each.footprint(9, 32, 4, LAST_PHASE) == each.footprint(9, 32, 4)
    spread = config().footprint(9, 32, 4, LAST_PHASE).events
    assert (
        spread.next_event(1)
        == 128 + 1
        < config().footprint(9, 32, 4).events.next_event(1)
    )


def test_events_are_never_closer_than_a_query_window():
    built = config(policy="snapkv", policy_config={"window": 20})
    events = built.footprint(500, 32, 4, LAST_PHASE).events
    assert [events.next_event(1), events.next_event(501)] == [500, 520]
    # A window as long as the interval leaves no choice.
    built = config(policy="snapkv", policy_config={"window": 64})
    assert built.footprint(500, 32, 4, LAST_PHASE).events.next_event(501) == 564


def test_a_preset_is_for_the_policies_that_have_it() -> None:
    config = KVPolicyConfig(
        **{"policy": "ams-tova", "options": {"preset": "code"}},
        allow=("ams-snapkv", "hard-snapkv"),
    )
    assert config.resolved("ams-snapkv").options["segment_mass"] == 0.02
    assert config.resolved("hard-snapkv").options["preset"] == "default"
    with pytest.raises(ValueError, match="preset: got 'code', expected one of default"):
        KVPolicyConfig("hard-snapkv", options={"preset": "code"})


def test_options_are_copied():
    options = {"preset": "code"}
    built = KVPolicyConfig.from_dict({**AMS, "policy_config": options})
    options["preset"] = "nonsense"
    assert built.options["preset"] == "code"


@pytest.mark.parametrize("key", INTEGER_KEYS, ids=lambda key: key.key)
@pytest.mark.parametrize("value", ["many", "64", 64.0, True, [64], -1])
def test_wrong_numbers_are_refused_by_name(key, value):
    with pytest.raises(ValueError) as error:
        config(**{key.key: value})
    assert str(error.value) == (
        f"{key.key}: got {value!r}, expected an integer >= {key.minimum}"
        + (f" or {key.word!r}" if key.word else "")
        + (" or a share such as '25%', at most 100%" if key.has_share else "")
    )


def test_events_inside_prompts_can_be_left_out():
    built = config(prefill_interval="prompt", budget=200, interval=64)
    plan = built.footprint(9000, 32, 4).events
    assert [plan.next_event(1), plan.next_event(9001)] == [9000, 9064]
    assert KVPolicyConfig.from_dict(built.to_dict()) == built
    built.validate_block_size(32)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"policy": "best"}, ["'best'", "ams", "streaming"]),
        ({"policy": "wgkv+ams-expcted"}, ["did you mean 'ams-expected'?"]),
        ({"policy": None}, ["policy: missing", "ams", "budget"]),
        ({"bugdet": 3}, ["'bugdet'", *VALID_KEYS, "did you mean 'budget'?"]),
        (
            {**AMS, "policy_config": {"min_segment": 0, "windwo": 3}},
            ["got the unknown key 'windwo'", "'ams-tova'", "mean 'window'?"],
        ),
        ({"pin": -1}, ["pin: got -1", "'none', 'system', 'prompt' or a number"]),
        ({"pin": True}, ["pin: got True", "'none', 'system', 'prompt' or a number"]),
        ({"pin": "all"}, ["pin: got 'all'", "'none', 'system', 'prompt'"]),
        ({"trace_dir": ""}, ["trace_dir: got ''", "folder"]),
        ({"policy_config": {"trace": ""}}, ["trace_dir: got ''", "folder"]),
        ({"policy_config": {"trace": "a\0b"}}, ["trace_dir: got 'a", "folder"]),
        ({"trace_dir": "~nobody-of-that-name/x"}, ["trace_dir: got '~nobody"]),
        ({"live_text": True}, ["live_text: got true", "live to be true as well"]),
        (
            {"spread_events": True, "policy_config": {"spread_events": False}},
            ["spread_events: given twice"],
        ),
        ({"policy_config": "x"}, ["policy_config: got 'x'", "mapping"]),
        ({"policy_config": {"min_segment": 8}}, ["'min_segment'", "'tova'"]),
        ({"policy": "ams-tova", "interval": 31}, ["interval: got 31", "32"]),
        (
            {"policy": "snapkv", "policy_config": {"window": 65}},
            ["interval: got 64", "65"],
        ),
        ({"policy": "snapkv", "prefill_interval": 8}, ["prefill_interval: got 8"]),
        ({"events": "sometimes"}, ["events: got 'sometimes'", "always", "pressure"]),
        ({"events": "pressure", "policy": "quest"}, ["events: got", "no budget"]),
        (
            {"events": "pressure", "policy": "holes"},
            ["'holes'", "a policy with a scorer"],
        ),
        (
            {"budget": "auto", "events": "always"},
            ["budget: got 'auto'", "a number", "events 'pressure'"],
        ),
        ({"budget": "auto", "policy": "holes"}, ["budget: got 'auto'", "a scorer"]),
        ({"budget": "25%", "policy": "holes"}, ["budget: got '25%'", "a scorer"]),
        ({"budget": "0%"}, ["budget: got '0%'", "or a share such as '25%'"]),
        ({"budget": "101%"}, ["budget: got '101%'", "a share such as '25%'"]),
        ({"interval": "25%"}, ["interval: got '25%'", "an integer >= 1"]),
    ],
)
def test_bad_values_name_key_value_and_valid_ones(values, words):
    with pytest.raises(ValueError) as error:
        config(**values)
    message = str(error.value)
    assert "\n" not in message
    assert [word for word in words if word not in message] == []


@pytest.mark.parametrize("values", ["tova", None, 3, ["tova"]])
def test_only_mappings_are_read(values):
    with pytest.raises(ValueError, match="expected a mapping with keys policy"):
        KVPolicyConfig.from_dict(values)


@pytest.mark.parametrize("budget", [1, 36, 67])
def test_block_size_decides_the_smallest_budget(budget):
    smallest = config(budget=68)
    smallest.validate_block_size(32)
    # The same minimum at once, however small the budget.
    message = (
        rf"^budget: got {budget}, expected at least 68 tokens "
        r"\(4 sinks \+ 32 recent \+ one page of 32\)$"
    )
    with pytest.raises(ValueError, match=message):
        config(budget=budget).validate_block_size(32)


@pytest.mark.parametrize(
    ("values", "block_size", "message"),
    [
        ({"sinks": 97}, 16, "budget: got 128, expected at least 145"),
        # Prompts are cut at whole superblocks.
        ({"prefill_interval": 100}, 32, r"prefill_interval: got 100.* of .*size 32"),
        (
            {"prefill_interval": 4096, "budget": 2048},
            96,
            r"prefill_interval: got 4096.* of .*size 96",
        ),
        (
            {"policy_config": {"allow": ["expected"]}},
            32,
            "^interval: got 64, expected at least 128 tokens, the query window of 'exp",
        ),
    ],
)
def test_block_sizes_and_windows_bound_other_numbers(values, block_size, message):
    with pytest.raises(ValueError, match=message):
        config(**values).validate_block_size(block_size)


@pytest.mark.parametrize(("block_size", "step"), [(96, 4032), (48, 4080), (8192, 8192)])
def test_a_default_is_cut_to_whole_superblocks(block_size: int, step: int):
    built = KVPolicyConfig.from_dict({"policy": "snapkv", "budget": 9000})
    built.validate_block_size(block_size)
    assert built.prefill_step(block_size) == step
    events = built.footprint(10**6, block_size, 1).events
    assert events.next_event(0) == -(-9001 // step) * step


@pytest.mark.parametrize(
    "extra_args",
    [
        None,
        {},
        {"kv_policy": "tova"},
        {"top_x": 1},
        {"half \ud800": "\udfff"},
        {"kv_transfer_params": {"a": 1}},
        {"kv_transfer_params": "no object"},
        {"kv_transfer_params": {"\ud800": 1}},
    ],
    ids=ascii,
)
def test_requests_that_ask_for_nothing_keep_the_servers_policy(extra_args):
    server = config()
    assert server.with_request(extra_args, 32) is server


def test_requests_may_ask_for_less():
    request = config().with_request(
        {"kv_budget": 96, "kv_interval": 32, "kv_recent": 16, "kv_sinks": 0}, 32
    )
    assert (request.budget_tokens, request.interval_tokens) == (96, 32)
    assert (request.recent_tokens, request.sink_tokens) == (16, 0)
    assert request.policy == "tova"


def test_a_request_is_not_checked_as_a_server_is(monkeypatch):
    server = config(policy_config={"allow": ["snapkv", "epikv"]})
    monkeypatch.setattr(KVPolicyConfig, "_check", None)
    request = server.with_request({"kv_policy": "snapkv", "kv_budget": 96}, 32)
    assert (request.policy, request.budget_tokens) == ("snapkv", 96)
    assert (server.policy, server.budget_tokens) == ("tova", 128)


def test_requests_may_switch_the_policy_off():
    assert config().with_request({"kv_policy": "none"}, 32) is None


@pytest.mark.parametrize(
    ("extra_args", "words"),
    [
        ({"kv_budget": 129}, ["kv_budget: got 129", "at most the server's 128"]),
        ({"kv_sinks": 5}, ["kv_sinks: got 5", "server's 4"]),
        ({"kv_budget": 67}, ["kv_budget: got 67", "at least 68", "one page of 32"]),
        ({"kv_budget": "many"}, ["kv_budget: got 'many'", "share such as '25%'"]),
        ({"kv_interval": "25%"}, ["kv_interval: got '25%'", "an integer >= 1"]),
        ({"kv_interval": 0}, ["kv_interval: got 0", ">= 1"]),
        ({"kv_sinks": 1.0}, ["kv_sinks: got 1.0", "integer"]),
        ({"kv_policy": "snapkv"}, ["got 'snapkv'", "'none'", "'tova' (see `allow`)"]),
        ({"kv_policy": "none", "kv_budget": 96}, ["kv_budget", "no effect"]),
        ({"kv_bugdet": 96}, ["'kv_bugdet'", "kv_budget", "kv_policy"]),
        ({"kv_budget": "auto"}, ["kv_budget: got 'auto', expected an integer >= 1"]),
        ({"kv_events": "always"}, ["the server's own key 'kv_events', expected"]),
        ({"kv_live": True}, ["the server's own key 'kv_live'"]),
        ({"kv_budgt": 9}, ["unknown key 'kv_budgt' (did you mean 'kv_budget'?)"]),
    ],
)
def test_bad_requests_name_key_value_and_valid_ones(extra_args, words):
    with pytest.raises(ValueError) as error:
        config().with_request(extra_args, 32)
    assert [word for word in words if word not in str(error.value)] == []


LONG = "x" * 10**6
WRONG = (LONG, "\ud800", [LONG] * 9, {LONG: LONG}, 10**999)


def is_short(error):
    """Return whether what is said is short, and can be logged and sent as it is."""
    said = str(error.value)
    return "got " in said and len(said) < 1500 and said.isprintable()


@pytest.mark.parametrize("value", WRONG, ids=lambda value: ascii(value)[:9])
def test_what_a_user_gave_is_shown_short(value):
    key = value if isinstance(value, str) else LONG
    given = [{name: value} for name in VALID_KEYS if name != "trace_dir"]
    given += [{key: 1}, {"allow": [key]}]
    options = [{name: value} for name in ("min_segment", "parity", "preset", "live")]
    given += [{**AMS, "policy_config": each} for each in (*options, {key: 1})]
    for values in given:
        with pytest.raises(ValueError) as error:
            config(**values)
        assert is_short(error), values.keys()


@pytest.mark.parametrize("value", WRONG, ids=lambda value: ascii(value)[:9])
def test_what_a_request_asked_for_is_shown_short(value):
    key = value if isinstance(value, str) else LONG
    asked = [{f"kv_{each.key}": value} for each in FLAG_KEYS]
    for extra_args in (*asked, {"kv_policy": value}, {f"kv_{key}": 1}):
        with pytest.raises(ValueError) as error:
            config().with_request(extra_args, 32)
        assert is_short(error), extra_args.keys()


@pytest.mark.parametrize("policy", ["wgkv", "wgkv+tova"])
@pytest.mark.parametrize(("key", "server"), [("kv_recent", 32), ("kv_sinks", 4)])
def test_requests_keep_the_window_of_gates(policy, key, server):
    options = {"wgkv_gates": "file", "allow": ["tova"]}
    started = config(policy=policy, policy_config=options)
    assert started.with_request({key: server}, 32) is not None
    why = f"^{key}: got 1, expected the server's {server}: '.*' decides for one window"
    with pytest.raises(ValueError, match=why):
        started.with_request({key: 1}, 32)
    assert started.with_request({"kv_policy": "tova", key: 1}, 32) is not None


def test_a_ceiling_is_above_the_floor_and_of_called_events_alone():
    wrong = (
        (48, "pressure", "least the budget, 96"),
        (200, "always", "cut to the bud"),
    )
    for ceiling, events, why in wrong:
        with pytest.raises(ValueError, match=f"^ceiling: got {ceiling}.*{why}"):
            config(budget=96, ceiling=ceiling, events=events)
    server = config(budget=96, ceiling=200, events="pressure")
    assert KVPolicyConfig.from_dict(server.to_dict()) == server
    asked = server.with_request({"kv_ceiling": 150, "kv_budget": 80}, 32)
    assert (asked.ceiling_tokens, asked.budget_tokens) == (150, 80)
    with pytest.raises(ValueError, match="^ceiling: got 520.*one page, 568"):
        wide = {"budget": "auto", "ceiling": 520, "recent": 500}
        config(**wide, events="pressure").with_budget(600).validate_block_size(64)
    roomy = config(budget="auto", events="pressure").with_budget(9000)
    assert roomy.with_request({"kv_ceiling": 400}, 32).budget_tokens == 400
    free = config(budget=96, events="pressure")
    assert free.with_request({"kv_ceiling": 9000}, 32).ceiling_tokens == 9000
    for each, value, why in (
        (server, 201, "at most the server's 200"),
        (server, 95, "least the budget"),
        (config(budget=96, events="always"), 200, "events 'always'"),
    ):
        with pytest.raises(ValueError, match=f"^kv_ceiling: got {value}.*{why}"):
            each.with_request({"kv_ceiling": value}, 32)


@pytest.mark.parametrize(
    ("policy", "options"), [("wgkv", {"wgkv_gates": "file"}), ("quest", {})]
)
def test_an_admission_or_a_selection_alone_has_no_budget(policy, options):
    server = config(policy=policy, recent=256, budget=256, policy_config=options)
    server.validate_block_size(32)
    why = f"expected the server's 256: '{policy}' evicts nothing"
    with pytest.raises(ValueError, match=f"^kv_budget: got 96, {why}"):
        server.with_request({"kv_budget": 96}, 32)
    footprint = server.footprint(1, 32, 4)
    assert footprint.events.next_event(0) == 4 + 256 + 32 + 64
    assert footprint.peak_blocks(2048) == 64
    assert server.is_ragged
    before = "tova" if policy == "quest" else f"{policy}+tova"
    evicting = config(policy=before, recent=256, budget=256, policy_config=options)
    with pytest.raises(ValueError, match="^budget: got 256"):
        evicting.validate_block_size(32)


def test_a_request_may_pin_what_it_wants_but_nothing_where_tokens_are_masked_at_once():
    server = config(pin=64, policy_config={"allow": ["dms"], "exact": True})
    assert server.with_request({"kv_pin": "prompt"}).pinned_tokens(300) == 300
    assert server.with_request({"kv_policy": "dms"}).pinned_tokens(300) == 0
    for pin, words in ((64, "masks pinned tokens"), (None, "got None, expected")):
        with pytest.raises(ValueError, match=words):
            server.with_request({"kv_policy": "dms", "kv_pin": pin})


def test_a_request_for_an_allowed_policy_keeps_the_servers_options():
    server = config(
        policy="ams-tova",
        policy_config={"segment_mass": 0.2, "allow": ["tova", "epikv", "expected"]},
    )
    assert server.with_request({"kv_policy": "epikv"}).pins == "prompt"
    asked = server.with_request({"kv_policy": "tova"})
    assert asked is not None
    assert (asked.policy, asked.resolved().window_tokens) == ("tova", 1)
    assert asked.resolved("ams-tova").options["segment_mass"] == 0.2
    # Its own window counts, not that of others.
    assert asked.with_request({"kv_interval": 8}).interval_tokens == 8


@pytest.mark.parametrize(
    ("policy", "block_size", "group_size", "blocks"),
    [
        ("snapkv", 16, 4, 4),
        ("snapkv", 32, 7, 4),
        ("tova", 32, 8, 1),
        ("knorm", 32, 8, 0),
    ],
)
def test_a_window_is_as_many_superblocks_as_its_queries_fill(
    policy, block_size, group_size, blocks
):
    footprint = config(policy=policy).footprint(1, block_size, group_size)
    assert footprint.window_tokens == config(policy=policy).resolved().window_tokens
    assert footprint.window_blocks == blocks


@pytest.mark.parametrize(
    "values", [{"budget_tokens": -1}, {"allow": "snapkv"}, {"options": None}]
)
def test_an_object_made_directly_is_checked(values):
    with pytest.raises(ValueError, match="got"):
        KVPolicyConfig(**{"policy": "tova", **values})


@pytest.mark.parametrize("key", ["trace_dir", "policy_config"])
def test_a_trace_may_be_in_the_users_folder(key, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    given = {"trace": "~/x"} if key == "policy_config" else "~/x"
    config = KVPolicyConfig.from_dict({"policy": "tova", key: given})
    assert config.trace_dir == str(tmp_path / "x")


def test_a_request_keeps_to_the_window_of_the_policy_that_it_names():
    values = {"policy": "streaming", "budget": 128, "interval": 64, "allow": ["snapkv"]}
    with pytest.raises(ValueError, match="^kv_interval: got 16, expected at least"):
        KVPolicyConfig.from_dict(AMS).with_request({"kv_interval": 16}, 32)
    server = KVPolicyConfig.from_dict(values)
    assert server.with_request({"kv_interval": 16}, 32).interval_tokens == 16
    said = "kv_interval: got 16, expected at least 32 tokens, the query window of 'snap"
    with pytest.raises(ValueError, match=said):
        server.with_request({"kv_policy": "snapkv", "kv_interval": 16}, 32)
