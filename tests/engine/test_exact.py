"""`exact` attention against its closed form, computed by a plain decoder alone.

The decoder decides from its own keys or queries which tokens are kept, layer by layer,
and hides the others as soon as they are `window` tokens old. Nothing that the server
recorded goes into it, but for evictions behind an admission.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from support.engine.dms_decoder import DmsDecoder, dropped, say_dms
from support.engine.helpers import BLOCK, Engine, make_jobs
from support.engine.oracle_quest import QuestDecoder
from support.engine.oracle_replay import check_replay, visibility
from support.engine.reference_decoder import ReferenceDecoder
from support.made_gates import make_gates
from support.made_patterns import write_pattern
from support.tiny_model import make_tiny_model
from vllm_kvpolicy.policies.admissions.wgkv import full_name

LAYERS, HEADS, DIM, WINDOW, SINKS, BUDGET = 2, 2, 32, 40, 7, 110
BASE = {"interval": 48, "prefill_interval": 128, "recent": WINDOW, "sinks": SINKS}
TIGHT = {"max_num_batched_tokens": 96, "max_model_len": 832, "foresees": False}
LENGTHS = (1, 100, 300, 600, 170)
BLOCKS = {False: 40, True: 27}


def seen(kept: torch.Tensor, window: int) -> torch.Tensor:
    """Return [H, T, T] bool: query i sees key j <= i while i - j < window, or kept."""
    place = torch.arange(kept.shape[-1])
    age = place[:, None] - place
    kept = kept | (place < SINKS)
    return (age >= 0) & ((age < window) | kept[:, None, :])


class GatedDecoder(ReferenceDecoder):
    """Sees what its own gates keep."""

    def __init__(self, folder: Path, gates: Any, threshold: float) -> None:
        super().__init__(folder)
        self.gates, self.threshold = gates, threshold

    def _attention(self, layer: int, hidden: torch.Tensor, visible: torch.Tensor):
        prefix = f"model.layers.{layer}."
        normed = self._norm(hidden, prefix + "input_layernorm.weight")
        prefix += "self_attn."
        before = self._heads(normed, prefix + "k_proj.weight", prefix + "k_norm.weight")
        after = self._rotate(before)
        own = {
            name.removeprefix(full_name(layer, "")): tensor
            for name, tensor in self.gates.tensors.items()
            if name.startswith(full_name(layer, ""))
        }
        parts = (
            F.rms_norm(part, (DIM,), own[f"{side}_key_norm.weight"], 1e-6)
            for side, part in (("pre", before), ("post", after))
        )
        rows = torch.cat([*parts], -1).transpose(1, 2).flatten(0, 1)[None]
        units = F.conv1d(rows, own["conv1.weight"], own["conv1.bias"], groups=HEADS)
        logits = F.conv1d(
            F.gelu(units), own["conv2.weight"], own["conv2.bias"], groups=HEADS
        )
        kept = logits[0].sigmoid() > self.threshold
        self.share = kept.float().mean().item()
        return super()._attention(layer, hidden, visible & seen(kept, WINDOW))


class GatedQuestDecoder(GatedDecoder, QuestDecoder):
    """Reads some pages of what its own gates keep."""

    def __init__(self, folder: Path, gates: Any, budget: int) -> None:
        QuestDecoder.__init__(self, folder, budget, BLOCK)
        self.gates, self.threshold = gates, 0.5


class ExactDmsDecoder(DmsDecoder):
    """Sees what its own decisions leave."""

    def _attention(self, layer: int, hidden: torch.Tensor, visible: torch.Tensor):
        before = len(self.rows)
        super()._attention(layer, hidden, visible)  # for the decisions alone
        logits = self.rows[before] * self.scale_by - self.offset
        del self.rows[before + 1 :]
        kept = ~dropped(logits, 1)
        visible = visible & seen(kept, WINDOW + 1)
        found = super()._attention(layer, hidden, visible)
        del self.rows[before + 1 :]
        return found


def run(model: Path, trace: Path, policy: dict, has_budget: bool, **changes: Any):
    """Return the results of an engine under strain."""
    limits = {**TIGHT, "num_blocks": BLOCKS[has_budget], **changes}
    jobs = make_jobs(LENGTHS, 150, prompt_logprobs=True)
    asked = {"budget": BUDGET, **BASE, **policy}
    with Engine(model, asked, trace, **limits) as engine:
        found = engine.run(jobs)
        engine.tell_worker_of_the_last_finish()
        assert engine.num_free == engine.num_usable, "superblocks are lost"
        counters = engine.counters()
    assert counters["blocks_returned"] > 0
    assert counters["tokens_dropped"] > 500
    return found


def check_closed_form(decoder: Any, found: Any, has_budget: bool) -> None:
    """Compare all log-probabilities; evictions are as recorded."""
    for result in found.results.values():
        if not has_budget:
            result.passes.clear()
        size = len(result.all_tokens)
        if has_budget:
            assert not visibility(decoder, result).all(), size
        check_replay(decoder, result)


@pytest.fixture
def gates(tmp_path: Path) -> Any:
    made = make_gates(LAYERS, HEADS, DIM, 6, window=WINDOW, rope_theta=1e4)
    made.save(tmp_path / "gates.safetensors")
    return made


@pytest.fixture(scope="module")
def borrowing_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_tiny_model(tmp_path_factory.mktemp("dms"))
    say_dms(folder, dms_window_size=WINDOW, dms_cr=2)
    return folder


@pytest.mark.parametrize("name", ["wgkv", "wgkv+snapkv"])
def test_gates(tiny_model: Path, tmp_path: Path, gates: Any, name: str) -> None:
    path, has_budget = tmp_path / "gates.safetensors", "+" in name
    options = {"wgkv_gates": str(path), "wgkv_threshold": 0.5, "exact": True}
    policy = {"policy": name, "policy_config": options}
    found = run(tiny_model, tmp_path / "trace", policy, has_budget)
    assert found.preemptions > 0
    decoder = GatedDecoder(tiny_model, gates, 0.5)
    check_closed_form(decoder, found, has_budget)
    assert 0.2 < decoder.share < 0.8


@pytest.mark.parametrize("name", ["dms", "dms+snapkv"])
def test_decisions(borrowing_model: Path, tmp_path: Path, name: str) -> None:
    policy = {"policy": name, "policy_config": {"exact": True}}
    has_budget = "+" in name
    found = run(borrowing_model, tmp_path, policy, has_budget)
    assert found.preemptions > 0
    check_closed_form(ExactDmsDecoder(borrowing_model), found, has_budget)


def test_chunks_and_intervals_do_not_matter(
    borrowing_model: Path, tmp_path: Path
) -> None:
    """What a query sees follows from positions alone."""
    found = []
    for tokens, interval in ((64, 48), (101, 96), (832, 64)):
        policy = {
            "policy": "dms",
            "policy_config": {"exact": True},
            "interval": interval,
        }
        changes = {"max_num_batched_tokens": tokens, "num_blocks": 400}
        trace = tmp_path / str(tokens)
        found.append(run(borrowing_model, trace, policy, False, **changes).tokens)
    assert found[0] == found[1] == found[2]


def test_quest_behind_it_reads_all_within_its_budget(
    borrowing_model: Path, tmp_path: Path
) -> None:
    options = {"exact": True, "quest_budget": 2000}
    policy = {"policy": "dms+quest", "policy_config": options}
    found = run(borrowing_model, tmp_path, policy, False)
    check_closed_form(ExactDmsDecoder(borrowing_model), found, False)


def test_quest_behind_it_chooses_pages(
    tiny_model: Path, tmp_path: Path, gates: Any
) -> None:
    """With rows cut where generated tokens are computed again."""
    path = tmp_path / "gates.safetensors"
    options = {"wgkv_gates": str(path), "wgkv_threshold": 0.5, "exact": True}
    options["quest_budget"] = 150
    policy = {"policy": "wgkv+quest", "policy_config": options}
    found = run(tiny_model, tmp_path / "trace", policy, False)
    assert found.preemptions > 0
    decoder = GatedQuestDecoder(tiny_model, gates, 150)
    for result in found.results.values():
        decoder.check(result)
    assert decoder.choices > 300 and decoder.closest > 1e-4


def test_a_request_with_another_admission_sees_all_it_holds(
    borrowing_model: Path, tmp_path: Path
) -> None:
    """`duo` with all heads retrieving is dense attention."""
    pattern = write_pattern(tmp_path / "duo", [[1, 1], [1, 1]], SINKS, WINDOW)
    options = {"exact": True, "duo_pattern": str(pattern), "duo_sparsity": 0}
    asked = {"policy": "dms", "policy_config": options, "allow": ["duo"], **BASE}
    jobs = make_jobs((300,), 60, extra_args={"kv_policy": "duo"}, prompt_logprobs=True)
    with Engine(borrowing_model, asked, tmp_path / "trace") as engine:
        (result,) = engine.run(jobs).results.values()
    assert result.events
    check_replay(DmsDecoder(borrowing_model), result)


def test_a_request_without_policy_sees_everything(
    borrowing_model: Path, tmp_path: Path
) -> None:
    """In one batch with one that does not."""
    asked = {"policy": "dms", "policy_config": {"exact": True}, **BASE}
    free = make_jobs((300,), 60, extra_args={"kv_policy": "none"}, prompt_logprobs=True)
    bound = make_jobs((1, 300), 60, seed=1, prompt_logprobs=True)[1:]
    with Engine(borrowing_model, asked, tmp_path) as engine:
        results = engine.run([*free, *bound]).results
    check_replay(DmsDecoder(borrowing_model), results["r0"])
    results["r1"].passes.clear()
    check_replay(ExactDmsDecoder(borrowing_model), results["r1"])
