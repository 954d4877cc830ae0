"""Owns the tests of the training: curriculum, batches, masks, and that it learns."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from reasoner import train
from reasoner.batches import make_batch, spread_positions
from reasoner.curriculum import FIRST_TRAINING_SEED
from reasoner.evaluate import CacheRule, Task, score
from reasoner.problems import TRAINED_TEMPLATES, generate, held_out
from reasoner.tokenizer import EOS, chat_prompt, encode


def test_batches_use_training_seeds_and_skip_what_is_held_out():
    ids, prompt_tokens = make_batch("copy", 9, 3000, FIRST_TRAINING_SEED)
    assert ids.shape[0] * ids.shape[1] <= 3000 < (ids.shape[0] + 1) * ids.shape[1]
    seeds = range(FIRST_TRAINING_SEED, FIRST_TRAINING_SEED + 2 * len(ids))
    problems = {
        (*encode(chat_prompt(p.prompt)), *encode(p.completion + EOS)): p
        for seed in seeds
        for p in (generate("copy", 9, seed, number) for number in TRAINED_TEMPLATES)
    }
    drawn = [problems[tuple(row)] for row in ids.tolist()]
    assert not any(held_out(problem) for problem in drawn)
    assert {len(encode(chat_prompt(p.prompt))) for p in drawn} == {prompt_tokens}
    first = sum(";" in problem.prompt and "?" in problem.prompt for problem in drawn)
    assert 0.3 < first / len(drawn) < 0.8


def test_spread_positions_ascend_and_leave_the_prompt_alone():
    ids, prompt_tokens = make_batch("copy", 12, 4000, FIRST_TRAINING_SEED)
    positions = spread_positions(ids, seed=1, max_position=1300)
    steps = positions.diff(dim=1)
    assert steps.min() == 1
    assert (steps[:, : prompt_tokens - 2] == 1).all()
    assert positions.max() <= 1300
    gapped = (steps > 1).any(1).float().mean()
    assert 0.2 < gapped < 0.6
    assert steps.max() > 100


def test_streaming_mask_keeps_sinks_and_recent_tokens():
    mask = CacheRule(recent=3, sinks=2).mask(2, 10, 6)
    assert mask.shape == (2, 1, 1, 10)
    assert mask[1, 0, 0].nonzero().flatten().tolist() == [0, 1, 7, 8, 9]
    kept = CacheRule(recent=3, keep_prompt=True).mask(1, 10, 6)
    assert kept[0, 0, 0].nonzero().flatten().tolist() == [0, 1, 2, 3, 4, 5, 7, 8, 9]
    assert CacheRule().mask(1, 10, 6) is None


def arguments(run, **options):
    words = ["--run", str(run), "--preset", "tiny", "--processes", "1"]
    for name, value in options.items():
        words += ["--" + name.replace("_", "-"), str(value)]
    return train.parse_args([*words, "--device", "cpu"])


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_tiny_preset_learns_a_toy_family_in_two_minutes(tmp_path):
    """Half a minute of one core, many where the CPU emulates Muon's bfloat16.

    By chance no trace of 25 tokens is right.
    """
    tokens = {"first_tokens": 1024, "step_tokens": 1024, "mix": 1}
    args = arguments(tmp_path, families="copy", steps=400, decay=40, **tokens)
    args.export = tmp_path / "checkpoint"
    train.train(0, args)
    model = AutoModelForCausalLM.from_pretrained(args.export).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.export)
    problems = Task("copy", 4).problems(50, first_seed=0)
    row = score(model, tokenizer, problems, CacheRule(), batch_rows=50)
    assert row.exact >= 10 and row.correct >= 20
    note = json.loads((args.export / "training.json").read_text())
    assert (note["preset"], note["steps"], [*note["lines"]]) == ("tiny", 400, ["copy"])


def test_an_interrupted_run_goes_on_as_if_it_had_not_been(tmp_path):
    options = {"first_tokens": 300, "step_tokens": 300, "report": 100}
    ends = []
    for name, stops in (("whole", [4]), ("parts", [2, 4])):
        (tmp_path / name).mkdir()
        for steps in stops:
            args = arguments(tmp_path / name, steps=steps, decay=1, **options)
            args.decay = 10**9  # the rate then hardly depends on the last step
            train.train(0, args)
        ends.append(torch.load(tmp_path / name / "state.pt", weights_only=True))
    first, second = (end["progress"] for end in ends)
    assert first["step"] == second["step"] == 4
    assert first["next_seed"] == second["next_seed"]
    for name, weight in ends[0]["model"].items():
        torch.testing.assert_close(weight, ends[1]["model"][name])
