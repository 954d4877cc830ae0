"""Installed is not enabled: without the flag vLLM is what it was.

Two processes are compared, with the plugin loaded and without.
"""

import json
import os
import re
import subprocess
import sys

import pytest

# Imports vLLM once, for two processes that go on from there.
SNAPSHOTS = """
import json, os, sys
from vllm.engine.arg_utils import EngineArgs
from vllm.plugins import load_general_plugins
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1 import kv_cache_spec_registry

def snapshot():
    load_general_plugins()
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    args = parser.parse_args(["--model", sys.argv[1], "--dtype", "float32",
        "--max-model-len", "512", "--kv-cache-memory-bytes", "8388608"])
    config = EngineArgs.from_cli_args(args).create_engine_config()
    kv_cache_spec_registry.KVCacheSpecRegistry._ensure_registered()
    tables = {
        name: sorted(f"{key}: {entry}" for key, entry in value.items())
        for name, value in vars(kv_cache_spec_registry).items()
        if name.startswith("_REGISTRY")
    }
    backends = {}
    for backend in AttentionBackendEnum:
        try:
            backends[backend.name] = backend.get_path()
        except Exception as error:
            backends[backend.name] = type(error).__name__
    groups = {group.title: sorted(action.option_strings[0] for action in
        group._group_actions if action.option_strings)
        for group in parser._action_groups}
    return {
        "groups": groups,
        "backends": backends,
        "specs": tables,
        "worker": config.parallel_config.worker_cls,
        "scheduler": config.scheduler_config.scheduler_cls,
        "additional": config.additional_config,
        "block_size": config.cache_config.block_size,
        "prefix_caching": config.cache_config.enable_prefix_caching,
        "hash": config.compute_hash(),
        "process_inputs": InputProcessor.process_inputs.__qualname__,
        "create": EngineArgs.create_engine_config.__qualname__,
        "loaded": sorted(m for m in sys.modules if m.startswith("vllm_kvpolicy.")),
    }

assert not any(name.startswith("vllm_kvpolicy") for name in sys.modules)
if child := os.fork():
    os.waitpid(child, 0)
else:
    os.environ["VLLM_PLUGINS"] = ""
print("SNAPSHOT" + json.dumps(snapshot()), flush=True)
os._exit(0)
"""
# Rooms that the entry point must not load, and what it may of the kernels.
NO_ENTRY = {"worker", "block_manager", "commands", "llm"}
ENTRY_KERNELS = {"kernels.libraries", "kernels.preferences"}


@pytest.fixture(scope="module")
def snapshots(tiny_model):
    """What vLLM is without the plugin and with it."""
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"}
    environment.pop("VLLM_PLUGINS", None)
    answer = subprocess.run(
        [sys.executable, "-c", SNAPSHOTS, str(tiny_model)],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert answer.returncode == 0, answer.stderr
    found = re.findall("^SNAPSHOT(.*)$", answer.stdout, re.MULTILINE)
    assert len(found) == 2, answer.stderr
    return [json.loads(text) for text in found]


def test_the_snapshots_differ_in_what_they_should(snapshots):
    without_plugin, with_plugin = snapshots
    assert with_plugin["loaded"] and not without_plugin["loaded"]
    assert with_plugin["create"] != without_plugin["create"]
    tables = without_plugin["specs"].values()
    assert any("FullAttentionSpec" in entry for table in tables for entry in table)


def test_only_the_help_group_is_new(snapshots):
    without_plugin, with_plugin = snapshots
    groups = dict(with_plugin["groups"])
    flags = groups.pop("KVPolicy")
    assert flags[0] == "--kv-budget" and len(flags) == 10
    assert groups == without_plugin["groups"]


def test_everything_else_is_the_same(snapshots):
    differ = ("groups", "create", "loaded")
    plain, ours = ({k: v for k, v in s.items() if k not in differ} for s in snapshots)
    assert ours == plain and len(plain) == 9


def test_the_entry_point_loads_no_room_of_an_engine(snapshots):
    loaded = {name.partition(".")[2] for name in snapshots[1]["loaded"]}
    assert {name.partition(".")[0] for name in loaded} & NO_ENTRY == set()
    kernels = {name for name in loaded if name.startswith("kernels.")}
    assert kernels <= ENTRY_KERNELS


@pytest.mark.parametrize("module", ["vllm_kvpolicy", "vllm_kvpolicy.plugin"])
def test_importing_the_entry_point_loads_no_library(module):
    code = (
        f"import sys, {module}; "
        "print({'torch', 'vllm', 'numpy', 'pydantic'} & set(sys.modules))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True
    )
    assert answer.stdout.strip() == "set()", answer.stderr
