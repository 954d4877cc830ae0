"""Serving models that decide with DMS: what survives is what a plain decoder decides.

Random weights, so that about half of the tokens are dropped. Logits near 0 may round
either way and are left out.
"""

from pathlib import Path
from shutil import copy, copytree
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from support.engine.admissions import follow_decisions
from support.engine.dms_decoder import DmsDecoder, dropped, say_dms
from support.engine.helpers import Engine, make_jobs
from support.engine.oracle_replay import activations, check_replay
from support.made_adapters import make_adapter
from support.tiny_model import make_tiny_model

LAYERS, HEADS, SIZE, WINDOW, SINKS, BUDGET = 2, 2, 32, 40, 7, 110
BASE = {"interval": 48, "prefill_interval": 128, "recent": WINDOW, "sinks": SINKS}
TIGHT = {"max_num_batched_tokens": 96, "max_model_len": 832, "foresees": False}
BLOCKS = {False: 40, True: 27}  # too few for all at once; with a budget, fewer
LENGTHS = (1, 100, 300, 600, 170)
NEAR = 2e-2  # of logits, 100 times what decides


@pytest.fixture(scope="module")
def borrowing_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_tiny_model(tmp_path_factory.mktemp("dms"))
    say_dms(folder, dms_window_size=WINDOW, dms_cr=2)
    return folder


def run(model: Path, trace: Path, policy: dict[str, Any], num_blocks: int, **changes):
    """Return the run and the counters of an engine under strain."""
    limits = {**TIGHT, **changes}
    jobs = make_jobs(LENGTHS, 150, prompt_logprobs=True)
    with Engine(model, {**BASE, **policy}, trace, num_blocks, **limits) as engine:
        found = engine.run(jobs)
        engine.tell_worker_of_the_last_finish()
        assert engine.num_free == engine.num_usable, "superblocks are lost"
        return found, engine.counters()


def dropped_tokens(found: Any) -> int:
    """Return the tokens per KV head that all events of a run dropped, in whole blocks.

    From what the trace says heads held: blocks that the scheduler had not taken back
    when the next event came do not count again.
    """
    num_heads, total = LAYERS * HEADS, 0
    for result in found.results.values():
        for events in result.passes:
            pages = frontier = 0
            for event in events:
                pages += num_heads * (event.frontier - frontier) // SIZE
                left = int((event.survivors >= 0).sum()) // SIZE
                total += -(-pages // num_heads) - -(-left // num_heads)
                pages, frontier = left, event.frontier
    return total * SIZE


def follow(decoder: DmsDecoder, result: Any, shift: int, has_budget: bool) -> dict:
    """Follow every head through all events; return what was seen."""
    activations(decoder, result)
    logits = decoder.logits
    is_dropped = dropped(logits, shift)
    # The last tokens have nobody to decide on them.
    margin = torch.full_like(logits, torch.inf)
    margin[..., : logits.shape[-1] - shift] = logits[..., shift:].abs()
    return follow_decisions(result, is_dropped, margin < NEAR, SINKS, has_budget)


def check(decoder: DmsDecoder, results: Any, shift: int, has_budget: bool) -> None:
    """Check what was kept and the log-probabilities of some requests."""
    total: dict[str, int] = {}
    for result in results:
        check_replay(decoder, result)
        for key, count in follow(decoder, result, shift, has_budget).items():
            total[key] = total.get(key, 0) + count
    assert min(total["kept"], total["dropped"]) > 500
    assert (total.get("evicted", 0) > 100) == has_budget
    assert total["near"] < total["kept"] / 100


@pytest.mark.parametrize("name", ["dms", "dms+snapkv", "dms+ams-tova"])
def test_survivors_are_those_of_a_borrowed_channel(
    borrowing_model: Path, tmp_path: Path, name: str
) -> None:
    """Under preemption, prompts in chunks and late answers; replayed exactly."""
    has_budget = "+" in name
    policy = {"policy": name, "budget": BUDGET}
    found, counters = run(borrowing_model, tmp_path, policy, BLOCKS[has_budget])
    assert found.preemptions > 0
    assert counters["blocks_returned"] > 0
    assert counters["tokens_dropped"] == dropped_tokens(found)
    check(DmsDecoder(borrowing_model), found.results.values(), 1, has_budget)


def test_survivors_do_not_depend_on_chunks(
    borrowing_model: Path, tmp_path: Path
) -> None:
    """The decision on a chunk's last token comes with the next chunk, or the answer."""
    found = []
    for tokens in (64, 101, 832):
        changes = {"max_num_batched_tokens": tokens}
        one, _ = run(borrowing_model, tmp_path / str(tokens), {"policy": "dms"}, 400,
                     **changes)  # fmt: skip
        found.append(
            {
                name: (
                    result.tokens,
                    [event.survivors.tolist() for event in result.events],
                )
                for name, result in one.results.items()
            }
        )
    assert found[0] == found[1] == found[2]


@pytest.mark.slow
def test_compiled_models_decide_alike(borrowing_model: Path, tmp_path: Path) -> None:
    """Hooks are traced into the compiled graph."""
    eager, _ = run(borrowing_model, tmp_path / "a", {"policy": "dms"}, 400)
    policy = {"policy": "dms"}
    compiled, _ = run(borrowing_model, tmp_path / "b", policy, 400, enforce_eager=False)
    for result in compiled.results.values():
        check_replay(DmsDecoder(borrowing_model), result)
    assert eager.tokens == compiled.tokens


def test_plain_model_with_metadata_decides_for_itself(tmp_path: Path) -> None:
    """No shift, and the channel is visible again behind the rotation."""
    folder = make_tiny_model(tmp_path / "model")
    text = f'{{"window_size": {WINDOW}, "alpha_scale": 80.0, "alpha_offset": 4.0}}'
    (folder / "dms_metadata.json").write_text(text)
    found, _ = run(folder, tmp_path / "trace", {"policy": "dms"}, BLOCKS[False])
    decoder = DmsDecoder(folder, scale=80.0, offset=4.0, zero_after_rope=False)
    check(decoder, found.results.values(), 0, False)


def test_options_have_the_last_word(borrowing_model: Path, tmp_path: Path) -> None:
    options = {"dms_channel": 3, "dms_shift": 0, "dms_zero_after_rope": False}
    policy = {"policy": "dms", "policy_config": options}
    found, _ = run(borrowing_model, tmp_path, policy, BLOCKS[False])
    decoder = DmsDecoder(borrowing_model, channel=3, zero_after_rope=False)
    check(decoder, found.results.values(), 0, False)


def test_survivors_are_those_of_an_adapter(tiny_model: Path, tmp_path: Path) -> None:
    adapter = make_adapter(LAYERS, HEADS, 64, window=WINDOW)
    adapter.save(tmp_path / "adapter.safetensors")
    options = {"dms_adapter": str(tmp_path / "adapter.safetensors")}
    policy = {"policy": "dms", "policy_config": options}
    found, _ = run(tiny_model, tmp_path / "trace", policy, BLOCKS[False])
    decoder = DmsDecoder(tiny_model, adapter.stacked(), 50.0, 2.5)
    check(decoder, found.results.values(), 1, False)


def test_a_request_without_policy_keeps_everything(
    borrowing_model: Path, tmp_path: Path
) -> None:
    """Its attention does not see the borrowed channel either."""
    jobs = make_jobs((300,), 60, extra_args={"kv_policy": "none"}, prompt_logprobs=True)
    with Engine(borrowing_model, {"policy": "dms", **BASE}, tmp_path) as engine:
        (result,) = engine.run(jobs).results.values()
    assert not result.events
    check_replay(DmsDecoder(borrowing_model), result)


def test_a_window_that_holds_everything_drops_nothing(tmp_path: Path) -> None:
    """Same log-probabilities as dense attention without the channel."""
    folder = make_tiny_model(tmp_path / "model")
    say_dms(folder, dms_window_size=2000, dms_cr=8)
    changes = {"recent": 2000, "policy": "dms"}
    found, counters = run(folder, tmp_path / "trace", changes, 400)
    assert counters["tokens_dropped"] == 0
    for result in found.results.values():
        check_replay(DmsDecoder(folder), result)


@pytest.mark.parametrize("policy", [None, {"policy": "tova", "budget": 128}])
def test_a_borrowing_model_is_refused_without_its_policy(
    borrowing_model: Path, policy: dict[str, Any] | None
) -> None:
    with pytest.raises(ValueError, match="add --kv-policy dms --kv-recent 40"):
        Engine(borrowing_model, policy)


def test_dropped_follows_the_successor() -> None:
    logits = torch.tensor([[[1.0, -1.0, 1.0]]])
    assert dropped(logits, 1).tolist() == [[[False, True, False]]]
    assert dropped(logits, 0).tolist() == [[[True, False, True]]]


def test_a_checkpoint_with_adapters_serves_them(
    tiny_model: Path, tmp_path: Path
) -> None:
    """As Model-Optimizer's recipe writes it, without architectures.

    Without a policy, and with a name, it is the plain model.
    """
    adapter = make_adapter(LAYERS, HEADS, 64, window=WINDOW)
    folder = tmp_path / "model"
    copytree(tiny_model, folder)
    save_file(dict(adapter.tensors), folder / "adapters.safetensors")
    keys = {
        "dms_separate_alpha": True,
        "dms_window_size": WINDOW,
        "dms_alpha_scale": 50.0,
        "dms_initial_alpha_offset": 2.5,
    }
    say_dms(folder, architectures=None, **keys)
    found, _ = run(folder, tmp_path / "trace", {"policy": "dms"}, BLOCKS[False])
    decoder = DmsDecoder(folder, adapter.stacked(), 50.0, 2.5)
    check(decoder, found.results.values(), 1, False)
    say_dms(folder, architectures=["Qwen3ForCausalLMDMS"])
    jobs = make_jobs((300,), 60)
    tokens = []
    for model in (folder, tiny_model):
        with Engine(model) as engine:
            tokens.append(engine.run(jobs).tokens)
    assert tokens[0] == tokens[1]


def test_a_llama_checkpoint_with_adapters_serves_them(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Without architectures, too; vLLM's own class would not know the tensors."""
    config = LlamaConfig(
        vocab_size=99,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=HEADS,
        head_dim=32,
        initializer_range=0.2,
        pad_token_id=0,
    )
    folder = tmp_path / "model"
    LlamaForCausalLM(config).save_pretrained(folder)
    for path in tiny_model.glob("tokenizer*"):
        copy(path, folder)
    adapter = make_adapter(LAYERS, HEADS, 64, window=WINDOW)
    save_file(dict(adapter.tensors), folder / "adapters.safetensors")
    keys = {"dms_separate_alpha": True, "dms_window_size": WINDOW}
    say_dms(folder, architectures=None, **keys)
    found, counters = run(folder, tmp_path / "trace", {"policy": "dms"}, BLOCKS[False])
    assert counters["tokens_dropped"] == dropped_tokens(found) > 0
