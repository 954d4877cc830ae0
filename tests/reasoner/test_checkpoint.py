"""Owns the tests of the packaged checkpoint: format, size, tokenizer, behaviour."""

import json
import subprocess
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import reasoner
from reasoner.evaluate import CacheRule, decode, encode_prompts, score
from reasoner.model import example_prompt, export_checkpoint, model_config, new_model
from reasoner.presets import PRESETS
from reasoner.problems import FAMILIES, extract_answer, generate
from reasoner.tokenizer import (
    EOS,
    PAD,
    build_tokenizer,
    chat_prompt,
    encode,
    vocabulary,
)

CHECKPOINT = Path(reasoner.__file__).parent / "checkpoint"
NOTE = json.loads((CHECKPOINT / "training.json").read_text())
PRESET = NOTE.get("preset", "tiny")
MAX_BYTES = 16_000_000
MAX_CHECKOUT_BYTES = 25 << 20


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(CHECKPOINT)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32).eval()


def test_directory_is_complete_and_small():
    files = {path.name for path in CHECKPOINT.iterdir()}
    assert files >= {
        "config.json",
        "example_prompt.txt",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(path.stat().st_size for path in CHECKPOINT.iterdir()) <= MAX_BYTES


def test_the_example_is_the_one_that_an_export_writes():
    assert (CHECKPOINT / "example_prompt.txt").read_text() == example_prompt() + "\n"


def test_the_whole_checkout_is_small():
    command = ["git", "ls-files", "-z"]
    root = CHECKPOINT.parents[1]
    names = subprocess.run(command, cwd=root, check=True, capture_output=True).stdout
    files = [root / name.decode() for name in names.split(b"\0") if name]
    assert CHECKPOINT / "model.safetensors" in files
    total = sum(path.stat().st_size for path in files if path.exists())
    assert total < MAX_CHECKOUT_BYTES


def test_config_suits_a_per_head_cache():
    config = AutoConfig.from_pretrained(CHECKPOINT)
    assert config.architectures == ["Qwen3ForCausalLM"]
    assert config.num_key_value_heads >= 2
    assert config.num_attention_heads > config.num_key_value_heads
    assert config.max_position_embeddings >= 4096
    assert config.head_dim == 32
    assert not config.use_sliding_window


def test_config_is_the_one_the_training_script_builds():
    saved = AutoConfig.from_pretrained(CHECKPOINT).to_dict()
    built = model_config(PRESET).to_dict()
    free = {"architectures", "_name_or_path", "transformers_version"}
    differing = {key for key in built if built[key] != saved.get(key)} - free
    assert not differing


def test_parameters_are_few_and_finite(model):
    assert sum(p.numel() for p in model.parameters()) <= 8_000_000
    assert all(torch.isfinite(p).all() for p in model.parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_tokenizer_round_trip_and_training_twin(tokenizer, family):
    problem = generate(family, 50, 7)
    text = chat_prompt(problem.prompt) + problem.completion + EOS
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert ids == encode(text)
    assert tokenizer.decode(ids) == text


def test_saved_tokenizer_is_the_built_one(tokenizer):
    assert tokenizer.get_vocab() == dict(vocabulary())
    assert tokenizer.chat_template == build_tokenizer().chat_template


@pytest.mark.parametrize(
    "text",
    ["Hello, World!\n\t", "wörld 中文 🙂", "\\boxed{", "<think>x</think>", "", "\0"],
)
def test_any_text_can_be_encoded(tokenizer, text):
    ids = tokenizer(text).input_ids
    assert ids == encode(text)
    assert all(0 <= index < len(tokenizer) for index in ids)


def test_chat_template_equals_training_prompt(tokenizer):
    problem = generate("sub", 20, 5)
    message = {"role": "user", "content": f" {problem.prompt}\n"}
    text = tokenizer.apply_chat_template(
        [message], tokenize=False, add_generation_prompt=True
    )
    assert text == chat_prompt(problem.prompt)
    ids = encode_prompts(tokenizer, [problem])[0].tolist()
    assert ids == encode(chat_prompt(problem.prompt))


def test_generated_text_shows_the_answer_but_no_special_token(tokenizer):
    problem = generate("copy", 6, 5)
    ids = tokenizer(problem.completion + EOS).input_ids
    shown = tokenizer.decode(ids, skip_special_tokens=True)
    assert shown == problem.completion
    assert extract_answer(shown) == problem.answer


def test_generation_stops_at_the_end_token(model):
    vocab = vocabulary()
    assert model.generation_config.eos_token_id == vocab[EOS]
    assert model.config.eos_token_id == vocab[EOS]


@pytest.mark.parametrize(
    ("preset", "least", "most"),
    [
        ("tiny", 0, 10**6),
        ("small", 10**6, 3 * 10**6),
        ("base", 6 * 10**6, 8 * 10**6),
        ("full", 6 * 10**6, 8 * 10**6),
    ],
)
def test_presets_have_the_stated_size_and_heads(preset, least, most):
    fresh, config = new_model(preset, 0), model_config(preset)
    assert least < sum(p.numel() for p in fresh.parameters()) <= most
    assert config.num_key_value_heads >= 2
    assert config.head_dim in (32, 64)
    assert config.max_position_embeddings >= 8192
    if preset != "tiny":
        assert config.num_attention_heads >= 4 * config.num_key_value_heads
        assert str(config.dtype).endswith("bfloat16")
    if preset in ("base", "full"):
        assert 6 <= config.num_hidden_layers <= 12
        assert 2 * sum(p.numel() for p in fresh.parameters()) <= MAX_BYTES


@pytest.mark.parametrize("family", NOTE["lines"])
def test_short_problems_are_solved(model, tokenizer, family):
    problems = [generate(family, 8, seed) for seed in range(40)]
    row = score(model, tokenizer, problems, CacheRule(), batch_rows=40)
    assert row.correct >= 38


@pytest.mark.slow
def test_a_streaming_cache_loses_what_a_full_cache_solves(model, tokenizer):
    """The long look-up family needs facts far back: the use of this checkpoint."""
    problems = [generate("copy", 110, seed) for seed in range(8)]
    full = score(model, tokenizer, problems, CacheRule(), batch_rows=8)
    streaming = score(model, tokenizer, problems, CacheRule(recent=124), batch_rows=8)
    assert full.trace_tokens >= 600
    assert full.correct >= 6
    assert streaming.correct <= 4


def test_cached_decoding_equals_one_forward_pass(model, tokenizer):
    problems = [generate("sub", 6, seed) for seed in range(4)]
    prompts = encode_prompts(tokenizer, problems)
    new = decode(model, prompts, 30, CacheRule())
    with torch.inference_mode():
        logits = model(torch.cat([prompts, new], 1)).logits
    again = logits[:, prompts.shape[1] - 1 : -1].argmax(-1)
    running = new != vocabulary()[PAD]
    assert running.sum() >= 100
    assert torch.equal(again[running], new[running])
    wide = decode(model, prompts, 30, CacheRule(recent=10_000))
    assert torch.equal(wide, new)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_new_model_has_heads_that_look_one_and_two_tokens_back(preset):
    fresh = new_model(preset, 0)
    fresh.set_attn_implementation("eager")
    ids = torch.tensor([encode(generate("copy", 20, 1).prompt)])
    with torch.inference_mode():
        weights = fresh(ids, output_attentions=True).attentions[0][0]
    for head, offset in ((0, 1), (1, 2)):
        assert weights[head].diagonal(-offset)[8:].mean() > 0.6
    assert weights[2].diagonal(-1)[8:].mean() < 0.3


@pytest.mark.parametrize("preset", ["tiny", "small"])
def test_export_replaces_a_directory(tmp_path, preset):
    target = tmp_path / "checkpoint"
    target.mkdir()
    (target / "stale.txt").write_text("old")
    fresh = new_model(preset, 1)
    export_checkpoint(fresh, target, preset, {"steps": 0})
    assert not (target / "stale.txt").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
    loaded = AutoModelForCausalLM.from_pretrained(target, dtype="auto")
    stored = getattr(torch, PRESETS[preset].stored)
    for (name, saved), (_, built) in zip(
        loaded.named_parameters(), fresh.named_parameters(), strict=True
    ):
        assert built.dtype == torch.float32
        assert saved.dtype == stored
        assert torch.equal(saved, built.to(stored)), name
