"""Installed is not enabled: without the flag vLLM is what it was.

Each case is a process of its own, with the plugin loaded and without.
"""

import json
import os
import subprocess
import sys

import pytest

SNAPSHOT = """
import json, sys
from vllm.engine.arg_utils import EngineArgs
from vllm.plugins import load_general_plugins
from vllm.utils.argparse_utils import FlexibleArgumentParser

load_general_plugins()
parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
args = parser.parse_args(["--model", sys.argv[1], "--dtype", "float32",
    "--max-model-len", "512", "--kv-cache-memory-bytes", "8388608"])
config = EngineArgs.from_cli_args(args).create_engine_config()

from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1 import kv_cache_spec_registry

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
    group._group_actions if action.option_strings) for group in parser._action_groups}
print("SNAPSHOT" + json.dumps({
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
}))
"""
# What the entry point may import: names, parameters and checks.
ENTRY_MODULES = {
    "api",
    "api.cli",
    "api.engine_config",
    "api.engines",
    "api.guards",
    "api.live",
    "api.patch",
    "api.patch_table",
    "api.request_guards",
    "compat",
    "config",
    "config_keys",
    "events",
    "kernels",
    "kernels.libraries",
    "kernels.preferences",
    "observe",
    "observe.hub",
    "observe.metrics",
    "observe.shared_files",
    "observe.routes",
    "observe.trace_files",
    "plugin",
    "policies",
    "policies.admissions",
    "policies.admissions.dms",
    "policies.admissions.dms.model",
    "policies.allocators",
    "policies.fingerprint",
    "policies.model_files",
    "policies.names",
    "policies.options",
    "policies.scorers",
    "policies.selections",
    "protocol",
    "sizes",
}


def snapshot(model, plugins):
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"}
    environment.pop("VLLM_PLUGINS", None)
    if plugins is not None:
        environment["VLLM_PLUGINS"] = plugins
    answer = subprocess.run(
        [sys.executable, "-c", SNAPSHOT, str(model)],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout.partition("SNAPSHOT")[2])


def facts(found):
    return [entry for table in found["specs"].values() for entry in table]


@pytest.fixture(scope="module")
def with_plugin(tiny_model):
    return snapshot(tiny_model, None)


@pytest.fixture(scope="module")
def without_plugin(tiny_model):
    return snapshot(tiny_model, "")


def test_the_snapshots_differ_in_what_they_should(with_plugin, without_plugin):
    assert with_plugin["loaded"] and not without_plugin["loaded"]
    assert with_plugin["create"] != without_plugin["create"]
    assert any("FullAttentionSpec" in entry for entry in facts(without_plugin))


def test_only_the_help_group_is_new(with_plugin, without_plugin):
    flags = with_plugin["groups"].pop("KVPolicy")
    assert flags[0] == "--kv-budget" and len(flags) == 7
    assert with_plugin["groups"] == without_plugin["groups"]


@pytest.mark.parametrize(
    "fact",
    [
        "backends",
        "specs",
        "worker",
        "scheduler",
        "additional",
        "block_size",
        "prefix_caching",
        "hash",
        "process_inputs",
    ],
)
def test_everything_else_is_the_same(with_plugin, without_plugin, fact):
    assert with_plugin[fact] == without_plugin[fact]


def test_the_entry_point_loads_entry_modules_only(with_plugin):
    loaded = {name.partition(".")[2] for name in with_plugin["loaded"]}
    assert loaded <= ENTRY_MODULES


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
