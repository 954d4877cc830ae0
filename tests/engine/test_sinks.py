"""gpt-oss: the model's learned sinks reach every measurement of attention.

Movers are in test_identity.py, answers in test_sliding_replay.py.
"""

from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from support.engine.helpers import Engine, make_jobs
from vllm_kvpolicy.kernels.window_usage import WindowUsage, window_usage
from vllm_kvpolicy.policies import compose

VALUES = {"budget": 128, "interval": 40, "prefill_interval": 256}


def test_events_read_the_sinks(folders, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the layers of full attention, and others as soon as they are loaded."""
    found, gpt_oss = [], folders("gpt_oss")

    def noting(*args: Any) -> WindowUsage:
        found.append(args[5])
        return window_usage(*args)

    monkeypatch.setattr(compose, "window_usage", noting)
    jobs = make_jobs((400,), 80, seed=12)
    values = {"policy": "ams-tova", **VALUES}
    with Engine(gpt_oss, values, max_num_batched_tokens=96) as engine:
        engine.run(jobs)
        before = found[:]
        named = engine.worker.get_model().named_parameters()
        more = [(name, each + 1) for name, each in named if name.endswith("sinks")]
        loaded = {"weights_iterator": more, "is_checkpoint_format": False}
        with torch.no_grad():
            engine.llm.collective_rpc("reload_weights", kwargs=loaded)
        engine.run(jobs)
    after = found[len(before) :]
    weights = load_file(gpt_oss / "model.safetensors")
    full = [1, 3]
    want = torch.stack([weights[f"model.layers.{i}.self_attn.sinks"] for i in full])
    assert before and all(torch.equal(got, want) for got in before)
    assert after and all(torch.equal(got, want + 1) for got in after)
