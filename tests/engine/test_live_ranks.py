"""The live page's numbers under vLLM's own tensor parallelism are those of one rank."""

from base64 import b64decode
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm.utils.system_utils import get_mp_context

from support.engine.helpers import Engine, one_job_each
from support.engine.tensor_parallel import LENGTHS, POLICY, Heads, write_model
from vllm_kvpolicy.observe.hub import EngineReader, Hub
from vllm_kvpolicy.observe.shared_files import own_engine

HEADS = Heads(query=8, kv=4)  # two KV heads on each of two ranks
NAMES = ("snapkv", "ams-tova", "ams-snapkv", "streaming")
Told = dict[tuple[str, int], dict[str, Any]]  # by policy and ordinal


def listen(model: Path, ranks: int) -> tuple[Told, dict[str, Any]]:
    """Return the events that a listener hears of, and what it knows at the end."""
    values = {**POLICY, "policy": NAMES[0], "allow": list(NAMES[1:])}
    values |= {"live": True, "live_text": True}
    jobs = one_job_each(NAMES, LENGTHS, 130, seed=0)
    changes = {"max_num_batched_tokens": 160, "max_model_len": 512}
    with Engine(model, values, tensor_parallel_size=ranks, **changes) as engine:
        config = engine.core.vllm_config
        assert config.parallel_config.tensor_parallel_size == ranks
        hub = Hub({0: EngineReader(own_engine(config), ranks)}, engine.num_usable)
        told: Told = {}

        def hear(_: Any) -> None:
            for record in hub.readers[0].poll():
                if record.get("kind") != "tokens":
                    told[record["policy"], record["ordinal"]] = record
                hub._take(0, dict(record))

        hear(None)
        engine.run(jobs, on_step=hear)
        counted = engine.counters()["events"]
        hear(None)
        texts = {name: hub._requests[told[name, 0]["request"]]["ids"] for name in NAMES}
    # Telling may take a share of a worker's time only, so some are left out.
    assert len(told) > 0.7 * counted and counted > 10
    return told, texts


@pytest.mark.slow
def test_heads_of_both_ranks_are_in_their_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here alone ranks are new interpreters, as vLLM starts them; see conftest."""
    monkeypatch.setattr(
        "vllm.v1.executor.multiproc_executor.get_mp_context", get_mp_context
    )
    model = write_model(tmp_path / "model", HEADS)
    (one, texts), (two, same_texts) = (listen(model, ranks) for ranks in (1, 2))
    assert texts == same_texts and all(texts.values())
    both = one.keys() & two.keys()
    assert len(both) > 6 and {name for name, _ in both} == set(NAMES)
    parted = 0
    for key in both:
        ours, theirs = one[key], two[key]
        assert (theirs["ranks"], theirs["missing"]) == (2, 0)
        assert ours["position"] == theirs["position"]
        assert np.shape(theirs["kept"]) == (2, HEADS.kv)
        assert ours["kept"] == theirs["kept"]
        if ours["first_known"] or theirs["first_known"]:
            continue  # not followed from its first event on
        np.testing.assert_allclose(ours["age"], theirs["age"], atol=0.002)
        np.testing.assert_allclose(ours["retention"], theirs["retention"], atol=0.002)
        shares = [
            np.frombuffer(b64decode(each["share"]), np.uint8) for each in (ours, theirs)
        ]
        assert shares[0].size == ours["position"]
        np.testing.assert_allclose(*(each.astype(int) for each in shares), atol=1)
        age = np.array(ours["age"])
        parted += bool(np.abs(age[:, :2] - age[:, 2:]).max() > 0.004)
    # Ranks whose places were swapped would differ.
    assert parted > 2
