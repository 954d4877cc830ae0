"""What engines tell an API process: their policy, and how large their pools are."""

import pickle
from types import SimpleNamespace
from typing import get_type_hints

import msgspec
import pytest
from vllm.v1.engine import EngineCoreReadyResponse

from support.engine_configs import Overlay, engine_args
from vllm_kvpolicy.api import engines, patch
from vllm_kvpolicy.api.request_guards import check_params
from vllm_kvpolicy.config import KVPolicyConfig
from vllm_kvpolicy.config_values import server_config

CONFIG = KVPolicyConfig.from_dict({"policy": "tova", "budget": 128, "interval": 64})


def ready(instance_id, num_blocks, index=0):
    """Return the message of an engine that is ready to serve."""
    kinds = get_type_hints(EngineCoreReadyResponse)
    blank = {name: kind() for name, kind in kinds.items() if isinstance(kind, type)}
    own = {"instance_id": instance_id, "num_gpu_blocks": num_blocks}
    fields = {**blank, "dp_stats_address": None, "data_parallel_rank": index, **own}
    return msgspec.msgpack.encode(EngineCoreReadyResponse(**fields))


def api_process(instance_id):
    """Return the VllmConfig of an API process, as far as it is read here."""
    cache = SimpleNamespace(num_gpu_blocks=None)
    return SimpleNamespace(instance_id=instance_id, cache_config=cache)


def test_command_lines_with_equal_policies_are_of_one_server():
    config = api_process(engines.server_name("head", CONFIG))
    assert engines.smallest_pool(config) is None
    engines.note_ready(config, b"")
    assert engines.smallest_pool(config) is None
    for index, (name, blocks) in enumerate([("head", 90), ("other", 40), ("more", 70)]):
        message = ready(engines.server_name(name, CONFIG), blocks, index)
        engines.note_ready(config, message)
    assert engines.smallest_pool(config) == 40


def test_an_engine_in_the_same_process_has_the_pool():
    config = api_process("x")
    config.cache_config.num_gpu_blocks = 12
    assert engines.smallest_pool(config) == 12


@pytest.mark.parametrize(
    "values", [None, {"budget": 256}, {"policy": "streaming"}, {"allow": ["snapkv"]}]
)
def test_an_engine_with_another_policy_is_refused(values):
    config = api_process(engines.server_name("head", CONFIG))
    name = "ab3f9"  # as vLLM names engines
    if values is not None:
        plain = {"policy": "tova", "budget": 128, "interval": 64}
        name = engines.server_name("other", KVPolicyConfig.from_dict(plain | values))
    with pytest.raises(ValueError, match="engine 3 has another policy .* same --kv-"):
        engines.note_ready(config, ready(name, 90, 3))


def test_each_host_may_record_its_own_trace():
    traced = KVPolicyConfig.from_dict({**CONFIG.to_dict(), "trace_dir": "/tmp/trace"})
    assert traced != CONFIG
    assert engines.server_name("x", traced) == engines.server_name("x", CONFIG)


def test_a_request_must_fit_the_smallest_pool_and_not_the_sum(policy_config):
    """vLLM adds up the blocks of all engines, but a request lives in one."""
    asked = SimpleNamespace(max_tokens=320, extra_args={"kv_policy": "none"})
    server = server_config(policy_config)
    try:
        for blocks, total in ((20, 20), (9, 29)):
            config = Overlay(policy_config, {"cache_config.num_gpu_blocks": total})
            engines.note_ready(policy_config, ready(config.instance_id, blocks))
            if blocks == 20:
                check_params(asked, 32, config, server)
        with pytest.raises(ValueError, match="11 superblocks .* at most 8, the size"):
            check_params(asked, 32, config, server)
    finally:
        del policy_config.kv_policy_pool


def test_vllms_client_hands_on_what_engines_say(policy_config):
    seen = []
    wrapped = patch._with_engine_check(lambda self, payload: seen.append(payload))
    config = SimpleNamespace(
        instance_id=engines.server_name("x", CONFIG),
        additional_config=policy_config.additional_config,
        cache_config=SimpleNamespace(num_gpu_blocks=None),
    )
    good = ready(config.instance_id, 7)
    wrapped(SimpleNamespace(vllm_config=config), good)
    assert (seen, config.kv_policy_pool) == ([good], 7)
    with pytest.raises(ValueError, match="another policy"):
        wrapped(SimpleNamespace(vllm_config=config), ready("ab3f9", 7))
    stock = SimpleNamespace(instance_id="c0ffe", additional_config={})
    wrapped(SimpleNamespace(vllm_config=stock), ready("ab3f9", 7))
    assert len(seen) == 2 and not hasattr(stock, "kv_policy_pool")


def test_a_budget_that_the_pool_decides_is_that_of_the_smallest(tiny_model):
    """Until it is known, and in workers, it is the least that it may be."""
    policy = {"policy": "tova", "interval": 64, "recent": 300}
    policy |= {"budget": "auto", "events": "pressure"}
    args = engine_args(
        tiny_model, additional_config={"kv_policy": policy}, max_num_seqs=4
    )
    config = args.create_engine_config()
    sent = pickle.loads(pickle.dumps(config))
    assert [server_config(each).budget_tokens for each in (config, sent)] == [384, 384]
    wrapped = patch._with_engine_check(lambda self, payload: None)
    found = []
    for blocks in (161, 121, 141):
        message = ready(config.instance_id, blocks)
        wrapped(SimpleNamespace(vllm_config=config), message)
        found.append(server_config(config).budget_tokens)
    # 40 superblocks each, less a window and 1 for rounding: 38 of 32 tokens, less 64.
    assert found == [1152, 832, 832]
    with pytest.raises(ValueError, match="kv_budget: got 833, .* the server's 832"):
        server_config(config).with_request({"kv_budget": 833})
