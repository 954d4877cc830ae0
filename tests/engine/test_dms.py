"""Models that decide with DMS: a borrowed channel, adapters, and what is refused.

What survives is what a plain decoder decides; test_admitted_tokens.py has a borrowed
channel under strain, beside other admissions and with `exact` attention. Random
weights, so that about half of the tokens are dropped. Logits near 0 may round either
way and are left out.
"""

from pathlib import Path
from shutil import copy, copytree
from typing import Any

import pytest
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from support.engine.admissions import follow_all
from support.engine.dms_decoder import DmsDecoder, say_dms
from support.engine.helpers import Engine, Run, make_jobs, serve
from support.engine.oracle_replay import check_replay
from support.made_adapters import make_adapter
from support.tiny_model import make_tiny_model

LAYERS, HEADS, WINDOW, SINKS = 2, 2, 40, 7
BASE = {"interval": 48, "prefill_interval": 128, "recent": WINDOW, "sinks": SINKS}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "model")


def run(model: Path, trace: Path, **policy: Any) -> Run:
    """Return the run of an engine whose pool is too small."""
    values = {**BASE, "policy": "dms", **policy}
    limits = {"max_num_batched_tokens": 96, "max_model_len": 416, "foresees": False}
    jobs = make_jobs((300, 170), 60, prompt_logprobs=True)
    return serve(model, values, jobs, trace, 14, **limits)


def check(decoder: DmsDecoder, found: Run, shift: int) -> None:
    """Check what was kept and the log-probabilities of all requests."""
    total = follow_all(
        found.results.values(),
        lambda _: decoder,
        SINKS,
        decide=lambda decoder, _: decoder.decisions(shift),
    )
    assert min(total["kept"], total["dropped"]) > 300


def test_plain_model_with_metadata_decides_for_itself(
    model: Path, tmp_path: Path
) -> None:
    """No shift, and the channel is visible again behind the rotation."""
    text = f'{{"window_size": {WINDOW}, "alpha_scale": 80.0, "alpha_offset": 4.0}}'
    (model / "dms_metadata.json").write_text(text)
    decoder = DmsDecoder(model, scale=80.0, offset=4.0, zero_after_rope=False)
    check(decoder, run(model, tmp_path / "trace"), 0)


def test_survivors_are_those_of_an_adapter(tiny_model: Path, tmp_path: Path) -> None:
    adapter = make_adapter(LAYERS, HEADS, 64, window=WINDOW)
    adapter.save(tmp_path / "adapter.safetensors")
    options = {"dms_adapter": str(tmp_path / "adapter.safetensors")}
    found = run(tiny_model, tmp_path / "trace", policy_config=options)
    check(DmsDecoder(tiny_model, adapter.stacked(), 50.0, 2.5), found, 1)


def test_a_window_that_holds_everything_drops_nothing(
    model: Path, tmp_path: Path
) -> None:
    """Same log-probabilities as dense attention without the channel."""
    say_dms(model, dms_window_size=2000, dms_cr=8)
    found = run(model, tmp_path / "trace", recent=2000)
    assert found.counters["tokens_dropped"] == 0
    for result in found.results.values():
        check_replay(DmsDecoder(model), result)


@pytest.mark.parametrize("policy", [None, {"policy": "tova", "budget": 128}])
def test_a_borrowing_model_is_refused_without_its_policy(
    model: Path, policy: dict[str, Any] | None
) -> None:
    say_dms(model, dms_window_size=WINDOW, dms_cr=2)
    with pytest.raises(ValueError, match="add --kv-policy dms --kv-recent 40"):
        Engine(model, policy)


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
    found = run(folder, tmp_path / "trace")
    check(DmsDecoder(folder, adapter.stacked(), 50.0, 2.5), found, 1)
    say_dms(folder, architectures=["Qwen3ForCausalLMDMS"])
    plain, same = (serve(m, None, make_jobs((300,), 30)) for m in (folder, tiny_model))
    assert plain.tokens == same.tokens


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
    found = run(folder, tmp_path / "trace")
    assert found.preemptions > 0 and found.counters["tokens_dropped"] > 0
