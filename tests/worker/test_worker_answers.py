"""The worker's overrides over a stand-in for vLLM's worker; no model, no device."""

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.outputs import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    AsyncModelRunnerOutput,
    ModelRunnerOutput,
)

from vllm_kvpolicy.block_manager.manager import KVPolicySpec
from vllm_kvpolicy.config import KVPolicyConfig
from vllm_kvpolicy.protocol import UsedBlocks
from vllm_kvpolicy.worker.setup import MIB, Share, SideTables, mib, too_small
from vllm_kvpolicy.worker.worker import KVPolicyWorkerMixin

ANSWERS = (UsedBlocks("a", 3, 2), UsedBlocks("b", 4, 1))
PAGE, LAYERS, EARLY = 4096, 3, 5000
TABLES = SideTables(
    num_requests=2,
    num_heads=6,
    block_size=4,
    max_local_tokens=7,
    num_memories=1,
    is_ragged=True,
)

NEEDED = 5  # superblocks of one request


class Later(AsyncModelRunnerOutput):
    """Tokens that are still on the device."""

    def __init__(self, output: ModelRunnerOutput, worker: "Worker") -> None:
        self.output, self.worker = output, worker
        worker.tokens_are_here = False

    def get_output(self) -> ModelRunnerOutput:
        self.worker.tokens_are_here = True
        return self.output

    def get_kv_connector_output(self) -> str:
        return "from a connector"


class Stock:
    """What vLLM's worker does, as far as the mixin asks."""

    output: Any = None
    available = 0
    tokens_are_here = True

    def sample_tokens(self) -> Any:
        return self.output

    def determine_available_memory(self) -> int:
        return self.available


class Worker(KVPolicyWorkerMixin, Stock):
    """The mixin over the stand-in."""

    def __init__(self, device: str = "cpu", explicit: int | None = None) -> None:
        self.answers: Any = self.read
        self.kv_policy_setup = SimpleNamespace(
            early_bytes=EARLY, side_tables=TABLES, shares=self.shares
        )
        self.kv_policy_runtime = SimpleNamespace(
            take_answers=self.take, end=lambda: None
        )
        self.device = torch.device(device)
        self.kv_policy_config = KVPolicyConfig("identity")
        self.model_config = SimpleNamespace(
            max_model_len=NEEDED * TABLES.block_size,
            original_max_model_len=None,
            hf_text_config=SimpleNamespace(layer_types=None),
            get_num_attention_heads=lambda *_: 2,
            use_mla=False,
            get_num_kv_heads=lambda *_: 2,
            model_arch_config=SimpleNamespace(head_size=32),
        )
        self.vllm_config = SimpleNamespace(
            model_config=self.model_config,
            scheduler_config=SimpleNamespace(
                max_num_batched_tokens=64, async_scheduling=False
            ),
            cache_config=SimpleNamespace(
                block_size=TABLES.block_size, cache_dtype="auto"
            ),
            parallel_config=None,
            num_lookahead_tokens=0,
        )
        self.cache_config = SimpleNamespace(
            kv_cache_memory_bytes=explicit, num_gpu_blocks_override=None
        )

    def shares(self, num_blocks: int, is_early_ours: bool) -> list[Share]:
        assert is_early_ours
        return [Share("values", TABLES.nbytes(num_blocks), ("tova", "adakv-tova"))]

    def take(self) -> Any:
        answers, self.answers = self.answers, None
        return answers

    def read(self) -> tuple[UsedBlocks, ...]:
        """What the device would have told once the tokens are there."""
        assert self.tokens_are_here, "an answer was waited for before the tokens"
        return ANSWERS

    def get_kv_cache_spec(self) -> dict[str, Any]:
        spec = KVPolicySpec(
            block_size=TABLES.block_size,
            num_kv_heads=2,
            head_size=PAGE // (2 * 2 * 4 * TABLES.block_size),  # keys and values
            dtype=torch.float32,
        )
        assert spec.page_size_bytes == PAGE
        return {str(n): spec for n in range(LAYERS)}


def make_output() -> ModelRunnerOutput:
    return ModelRunnerOutput(req_ids=["a"], req_id_to_index={"a": 0})


@pytest.mark.parametrize("later", [False, True])
def test_answers_reach_the_scheduler_once(later: bool) -> None:
    worker, output = Worker(), make_output()
    worker.output = Later(output, worker) if later else output
    got = worker.sample_tokens()
    if later:
        assert isinstance(got, AsyncModelRunnerOutput)
        assert got.get_kv_connector_output() == "from a connector"
        got = got.get_output()
    assert isinstance(got, ModelRunnerOutput)
    assert got.kv_policy_answers == ANSWERS and got.req_ids == ["a"]
    sent = pickle.loads(pickle.dumps(got))  # to another process
    assert sent.kv_policy_answers == ANSWERS
    assert not hasattr(output, "kv_policy_answers")
    assert worker.sample_tokens() is worker.output


def test_answers_do_not_stick_to_the_empty_output() -> None:
    worker = Worker()
    worker.output = EMPTY_MODEL_RUNNER_OUTPUT
    assert worker.sample_tokens().kv_policy_answers == ANSWERS
    assert not hasattr(EMPTY_MODEL_RUNNER_OUTPUT, "kv_policy_answers")


@pytest.mark.parametrize(
    ("device", "explicit", "early"),
    [("cpu", None, EARLY), ("cpu", 1, EARLY), ("cuda", 1, EARLY), ("cuda", None, 0)],
)
def test_the_pool_leaves_room_for_all_tables(
    device: str, explicit: int | None, early: int
) -> None:
    """What is made after vLLM's measurement is always ours to count."""
    worker = Worker(device, explicit)
    worker.available = 10**6
    got = worker.determine_available_memory()
    num_blocks, rest = divmod(got, LAYERS * PAGE)
    assert rest == 0
    assert num_blocks == TABLES.pool_blocks(10**6 - early, LAYERS * PAGE) > 0
    assert got + early + TABLES.nbytes(num_blocks) <= 10**6


ENOUGH = EARLY + TABLES.nbytes(NEEDED + 1) + (NEEDED + 1) * LAYERS * PAGE
FITS = {EARLY + TABLES.nbytes(n) + n * LAYERS * PAGE: n for n in range(1, NEEDED + 1)}


@pytest.mark.parametrize("available", [0, EARLY - 10, EARLY + 5, *FITS, ENOUGH - 1])
def test_too_little_memory_is_refused_with_what_takes_it(available: int) -> None:
    """Also where as much fits as a request needs: vLLM keeps one superblock back."""
    worker = Worker()
    worker.available = available
    with pytest.raises(ValueError) as caught:
        worker.determine_available_memory()
    text = str(caught.value)
    num_blocks = max((n for size, n in FITS.items() if size <= available), default=0)
    assert f"of {mib(available)}, --kv-policy takes" in text
    assert f"hold {num_blocks} superblocks of {mib(LAYERS * PAGE)}" in text
    assert f"(values {mib(TABLES.nbytes(num_blocks))} for tova, adakv-tova)" in text
    assert f"expected at least {NEEDED + 1}: {NEEDED} that one request" in text
    assert "\n" not in text and "`allow`" in text and "--max-num-seqs" in text
    worker.available = ENOUGH
    assert worker.determine_available_memory() == (NEEDED + 1) * LAYERS * PAGE


def test_a_number_of_superblocks_that_the_user_gives_is_left_to_vllm() -> None:
    worker = Worker()
    worker.cache_config.num_gpu_blocks_override = 7
    worker.available = ENOUGH - 1
    assert worker.determine_available_memory() == NEEDED * LAYERS * PAGE


def test_the_largest_parts_come_first_and_small_ones_are_left_out() -> None:
    """As much as is advised is enough, in MiB."""
    shares = [
        Share("places of queries", 1000, ("tova", "rkv")),
        Share("values of kept tokens", 3 * MIB, ("rkv",)),
        Share("page lists of heads", 21 * MIB, ("adakv-snapkv",)),
    ]
    text = too_small(32 * MIB, (7, 35), MIB, shares, 60 * MIB)
    assert text.startswith(
        "KV cache memory: of 32.0 MiB, --kv-policy takes 24.0 MiB for tables (page "
        "lists of heads 21.0 MiB for adakv-snapkv; values of kept tokens 3.0 MiB for "
        "rkv), and the other 8.0 MiB hold 7 superblocks of 1.0 MiB, expected at least "
        "36: 35 that one request of --max-model-len tokens may hold, and vLLM's null "
        "block; give at least 60.0"
    )
    alone = too_small(32 * MIB, (7, 35), MIB, shares[1:2], 60 * MIB)
    assert "`allow`" not in alone


def test_where_vllm_searches_for_the_length_one_token_is_enough() -> None:
    """`--max-model-len auto`: what fits is the search's to find, not ours to refuse."""
    worker = Worker()
    worker.model_config.original_max_model_len = -1
    for worker.available, num_blocks in FITS.items():
        if num_blocks > 1:
            got = worker.determine_available_memory()
            assert got == num_blocks * LAYERS * PAGE
    worker.available = min(FITS)
    with pytest.raises(ValueError, match="hold 1 superblocks .* at least 2: 1 that"):
        worker.determine_available_memory()
