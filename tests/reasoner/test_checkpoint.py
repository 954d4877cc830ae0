"""Owns the tests of the packaged checkpoint: format, size, tokenizer, behaviour."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import reasoner
from reasoner.evaluate import CacheRule, decode, encode_prompts, score
from reasoner.model import example_prompt, export_checkpoint, model_config, new_model
from reasoner.presets import PRESETS
from reasoner.problems import FAMILIES, generate
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


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(CHECKPOINT)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32).eval()


def test_the_example_is_the_one_that_an_export_writes():
    assert (CHECKPOINT / "example_prompt.txt").read_text() == example_prompt() + "\n"


def test_config_is_the_one_the_training_script_builds():
    saved = AutoConfig.from_pretrained(CHECKPOINT).to_dict()
    built = model_config(PRESET).to_dict()
    free = {"architectures", "_name_or_path", "transformers_version"}
    differing = {key for key in built if built[key] != saved.get(key)} - free
    assert not differing


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


@pytest.mark.parametrize("family", NOTE["lines"])
def test_short_problems_are_solved(model, tokenizer, family):
    problems = [generate(family, 8, seed) for seed in range(20)]
    row = score(model, tokenizer, problems, CacheRule(), batch_rows=20)
    assert row.correct >= 19


@pytest.mark.slow
def test_a_streaming_cache_loses_what_a_full_cache_solves(model, tokenizer):
    """The long look-up family needs facts far back: the use of this checkpoint."""
    problems = [generate("copy", 110, seed) for seed in range(8)]
    full = score(model, tokenizer, problems, CacheRule(), batch_rows=8)
    streaming = score(model, tokenizer, problems, CacheRule(recent=124), batch_rows=8)
    assert full.trace_tokens >= 600
    assert full.correct >= 6 and streaming.correct <= 4


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


def test_a_new_model_has_heads_that_look_one_and_two_tokens_back():
    fresh = new_model("tiny", 0)
    fresh.set_attn_implementation("eager")
    ids = torch.tensor([encode(generate("copy", 20, 1).prompt)])
    with torch.inference_mode():
        weights = fresh(ids, output_attentions=True).attentions[0][0]
    for head, offset in ((0, 1), (1, 2)):
        assert weights[head].diagonal(-offset)[8:].mean() > 0.6
    assert weights[2].diagonal(-1)[8:].mean() < 0.3


def test_export_replaces_a_directory(tmp_path):
    """In the dtype of its preset, here bfloat16."""
    preset, target = "small", tmp_path / "checkpoint"
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
