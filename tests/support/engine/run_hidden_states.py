"""Runs an engine that measures token signals, eager here or compiled elsewhere."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from support.engine.helpers import Engine, make_jobs

LENGTHS, NEW_TOKENS = (150, 33, 220), 120
# Every signal of the variant "segment": steps of two layers, variance of keys. The
# budget never binds, so that all tokens see all others; the pool is too small for all
# requests at once, so that some are computed again.
POLICY = {"policy": "epikv", "budget": 512, "policy_config": {"variant": "segment"}}
CHANGES = {
    "num_blocks": 22,
    "max_model_len": 512,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 4,
    "foresees": False,
}


def run(model: Path, **changes: Any) -> dict[str, np.ndarray]:
    """Generate, and collect what was measured of every request.

    Returns:
        Per request `NAME_tokens` [T], prompt included, and `NAME_SIGNAL` [n] float32
        for `hidden0`, `hidden1` and `key`, n <= T; and the numbers of `preemptions`
        and of compiled `mode`.
    """
    found: dict[str, np.ndarray] = {}
    with Engine(model, POLICY, **CHANGES, **changes) as engine:

        def read(_: Engine) -> None:
            for request_id, request in engine.scheduler.requests.items():
                size = request.num_computed_tokens
                (signals,) = engine.runtime.captures
                rows = signals.values(
                    torch.from_numpy(signals.rows_of([request_id])), size
                )
                count = {"hidden": 0, "key": 0}
                for signal, row in rows.items():
                    name = f"{request_id.partition('-')[0]}_{signal.kind}"
                    found[f"{name}{count[signal.kind]}"] = row[0].numpy().copy()
                    count[signal.kind] += 1

        result = engine.run(make_jobs(LENGTHS, NEW_TOKENS, seed=80), read)
        mode = engine.llm.llm_engine.vllm_config.compilation_config.mode
    for name, request in result.results.items():
        found[f"{name}_tokens"] = np.asarray(request.all_tokens)
    counts = {"preemptions": result.preemptions, "mode": int(mode)}
    return found | {name: np.asarray(count) for name, count in counts.items()}


if __name__ == "__main__":
    np.savez(sys.argv[2], **run(Path(sys.argv[1]), enforce_eager=False))
