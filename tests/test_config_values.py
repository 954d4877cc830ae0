"""What vLLM keys compiled models by, in a VllmConfig of an engine with a policy."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest

from support.engine_configs import engine_args
from vllm_kvpolicy.config import CONFIG_KEY
from vllm_kvpolicy.config_values import ConfigValues, server_config

GRAPHS = (), ("layers.0: hook of a policy",)


@pytest.fixture(scope="module")
def key_of(tiny_model: Path):
    """Return vLLM's key of an engine, where a worker has told a graph or not."""

    def key(graph: tuple[str, ...] | None, budget: int = 128, **others: Any) -> str:
        policy = {"policy": "ams-tova", "budget": budget}
        args = engine_args(
            tiny_model, additional_config={"kv_policy": policy, **others}
        )
        config = args.create_engine_config()
        if graph is not None:
            config.additional_config.set_graph(graph)
        return config.compute_hash()

    return key


def test_numbers_count_until_a_graph_is_told(key_of) -> None:
    assert key_of(None, 128) != key_of(None, 256)
    assert key_of(GRAPHS[0], 128) == key_of(GRAPHS[0], 256) != key_of(None, 128)


def test_another_graph_is_another_key(key_of) -> None:
    assert key_of(GRAPHS[0]) != key_of(GRAPHS[1])


def test_what_others_put_there_counts(key_of) -> None:
    keys = {key_of(GRAPHS[1], **others) for others in ({}, {"a": 1}, {"a": 2})}
    assert len(keys) == 3


def test_stock_has_a_key_of_its_own(key_of, tiny_model: Path) -> None:
    stock = engine_args(tiny_model).create_engine_config().compute_hash()
    assert stock not in {key_of(graph) for graph in (None, *GRAPHS)}


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda config: pickle.loads(pickle.dumps(config))],
    ids=["copied", "sent to a process"],
)
def test_copies_are_worth_the_same(policy_config, copied) -> None:
    """vLLM sends a config to the processes of an engine, where a worker tells."""
    twin = copied(policy_config)
    assert isinstance(twin.additional_config, ConfigValues)
    assert twin.compute_hash() == policy_config.compute_hash()
    assert server_config(twin) == server_config(policy_config)
    before = twin.compute_hash()
    twin.additional_config.set_graph(GRAPHS[1])
    assert before == policy_config.compute_hash() != twin.compute_hash()


def test_configs_of_parts_of_a_model_share_the_values(policy_config) -> None:
    """vLLM makes a config for the language model in a larger one while it loads it."""
    config = copy.deepcopy(policy_config)
    part = config.with_hf_config(config.model_config.hf_config)
    assert part.additional_config is config.additional_config
    before = part.compute_hash()
    config.additional_config.set_graph(GRAPHS[1])
    assert part.compute_hash() != before


def test_it_reads_as_a_dict() -> None:
    values = {CONFIG_KEY: {"policy": "tova"}, "other": 1}
    found = ConfigValues(values)
    assert dict(found) == values
    assert repr(found) == repr(values)
