"""Flags and options with which servers of the tiny model serve names of policies."""

import json
from collections.abc import Iterable
from pathlib import Path

from support.calibration_files import options_for
from vllm_kvpolicy.policies.names import parse

FLAGS = {
    "--kv-budget": "128",
    "--kv-interval": "64",
    "--dtype": "float32",
    "--max-model-len": "1024",
    "--max-num-seqs": "8",
    "--kv-cache-memory-bytes": "8388608",
    "--served-model-name": "tiny",
}
# Options that fit the short interval.
OPTIONS = {"expected_window": 48, "snapmax_window": 48}
ONE_PER_ALLOCATOR = ("keydiff", "ams-expected", "adakv-snapkv", "pyramid-h2o")
ONE_PER_ALLOCATOR += ("chunk-lagkv", "hard-rkv", "strat-random", "trim-snapmax")
ONE_PER_ALLOCATOR += ("wgkv+snapkv", "snapkv+quest")


def options_of(served: Iterable[str]) -> dict[str, int]:
    """Return those of OPTIONS that some of the names read; a server refuses others."""
    read = {key for name in served for key in parse(name).options}
    return {key: value for key, value in OPTIONS.items() if key in read}


def calibration(name: str, model: Path, folder: Path) -> dict[str, str]:
    """Return the option that names a calibration file, where a policy needs one."""
    config = json.loads((model / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    layers, size = config["num_hidden_layers"], config["head_dim"]
    return options_for(name, folder, layers, kv_heads, heads // kv_heads, size)
