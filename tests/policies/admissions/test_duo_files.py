"""Patterns of DuoAttention: how they are read, and which heads retrieve."""

import pytest
import torch

from support.made_patterns import write_pattern
from vllm_kvpolicy.api.engine_config import check_files
from vllm_kvpolicy.config import KVPolicyConfig
from vllm_kvpolicy.policies.admissions.duo import CONFIG_FILE, HEADS_FILE, load

USE = [[0.9, 0.1, 0.5], [0.2, 0.7, 0.5]]


def test_heads_of_least_use_do_not_retrieve(tmp_path):
    pattern = load(write_pattern(tmp_path, USE, 128, 256))
    assert (pattern.sinks, pattern.recent) == (128, 256)
    torch.testing.assert_close(pattern.use, torch.tensor(USE, dtype=torch.float64))
    for sparsity, wanted in (
        (0, [[1, 1, 1], [1, 1, 1]]),
        (1 / 3, [[1, 0, 1], [0, 1, 1]]),
        (0.5, [[1, 0, 0], [0, 1, 1]]),  # of equals, the earlier one goes
        (1, [[0, 0, 0], [0, 0, 0]]),
    ):
        assert pattern.retrieving(sparsity).int().tolist() == wanted


@pytest.mark.parametrize(
    ("file", "text", "reason"),
    [
        (HEADS_FILE, None, "FileNotFoundError"),
        (CONFIG_FILE, None, "FileNotFoundError"),
        (HEADS_FILE, "", "numbers per layer"),
        (HEADS_FILE, "0.5\t0.5\n0.5\n", "numbers per layer"),
        (HEADS_FILE, "0.5\tmany\n", "could not convert"),
        (HEADS_FILE, "0.5\t1.5\n", "values from 0 to 1"),
        (HEADS_FILE, "0.5\tnan\n", "values from 0 to 1"),
        (CONFIG_FILE, "[]", "TypeError"),
        (CONFIG_FILE, '{"sink_size": 4}', "recent_size"),
        (CONFIG_FILE, '{"sink_size": 4, "recent_size": 2.5}', "recent_size: got 2.5"),
    ],
)
def test_broken_files_are_named(tmp_path, file, text, reason):
    folder = write_pattern(tmp_path / "pattern", USE, 4, 32)
    (folder / file).unlink()
    if text is not None:
        (folder / file).write_text(text)
    with pytest.raises(ValueError, match=f"^duo pattern .*pattern.*{reason}"):
        load(folder)


def test_start_checks(policy_config, tmp_path):
    def check(use, recent=32, sinks=4):
        folder = write_pattern(tmp_path, use, sinks, recent)
        options = {"duo_pattern": str(folder)}
        asked = {"policy": "duo", "policy_config": options}
        check_files(KVPolicyConfig.from_dict(asked), policy_config)

    fitting = [[0.9, 0.1], [0.2, 0.7]]
    check(fitting)
    with pytest.raises(ValueError, match=r"layers and KV heads: got \[2, 3\]"):
        check(USE)
    with pytest.raises(ValueError, match="set --kv-sinks 4 --kv-recent 256"):
        check(fitting, recent=256)
    with pytest.raises(ValueError, match="set --kv-sinks 128 --kv-recent 32"):
        check(fitting, sinks=128)
