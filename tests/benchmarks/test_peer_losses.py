"""Tests of the losses behind one compression on the peer, without kvpress."""

import json
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import cross_entropy

from benchmarks.language import __main__ as language
from benchmarks.language.texts import Text
from benchmarks.peer import __main__ as command
from benchmarks.peer import process
from benchmarks.peer.forcing import read
from benchmarks.report import tables

AT, LENGTH = 24, 41
KEPT = 8
FAKE = r"""
import json, sys
from pathlib import Path

folder = Path(sys.argv[1])
settings = json.loads(input())
print(json.dumps({"kvpress": "fake"}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    with (folder / "asked").open("a") as file:
        file.write(line)
    tokens = asked["token_ids"][asked["at"] + 1:]
    extra = 0 if asked["row"] == "full" else 0.5
    said = {
        "losses": [token / 10 + extra for token in tokens],
        "held": 32.0 if asked["row"] == "full" else 16.0,
        "kept_mean": None, "sinks_held": [],
    }
    if asked["row"] == "tova":
        said |= {"kept_mean": 16.0, "sinks_held": [0.25]}
    if asked["row"] == "knorm":
        said = {"refused": "AssertionError: no"}
    print(json.dumps(said), flush=True)
"""


def made_texts(count):
    """Return texts of 65 tokens: an event at 32 of a budget of 16, and an interval."""
    return [
        Text(f"novel-{n}", "novel", tuple((i * (n + 3)) % 11 for i in range(65)))
        for n in range(count)
    ]


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """A folder in which a fake worker writes what it was asked about two texts."""
    script = tmp_path / "fake.py"
    script.write_text(FAKE)
    words = [sys.executable, str(script), str(tmp_path)]
    monkeypatch.setattr(process, "command", lambda python: words)

    def reading(asked):
        common = SimpleNamespace(model=tmp_path, dtype=asked.dtype)
        return common, {"losses": made_texts(asked.texts)}

    monkeypatch.setattr(language, "read", reading)
    return tmp_path


def run(folder, *words, texts=2, policies=("tova", "adakv-snapkv")):
    given = ["losses", "--folder", str(folder), "--texts", str(texts)]
    given += ["--budgets", "16", "--intervals", "32", "--text-tokens", "65"]
    return command.main([*given, "--policies", *policies, *words])


def asked_of(folder):
    return [json.loads(line) for line in (folder / "asked").read_text().splitlines()]


def test_its_record_stands_beside_ours_in_a_table(fake):
    run(fake)
    record = json.loads((fake / "losses.json").read_text())
    first, second = (sum(text.token_ids[33:]) / 32 / 10 for text in made_texts(2))
    full, tova, _ = record["rows"]
    assert full["policy"] == "kvpress:full" and full["kept"] == 32
    assert full["loss"] == pytest.approx([first, second], abs=1e-4)
    assert tova["loss"] == pytest.approx([first + 0.5, second + 0.5], abs=1e-4)
    assert (tova["kept"], tova["sinks_held"]) == (16, 0.25)
    assert "sinks_held" not in full and len(tova["places"]) == 8
    place = {"part": "losses", "budget": 16, "interval": 32}
    ours = {"items": record["items"], "settings": {}}
    ours["rows"] = [{"policy": "tova", "loss": [first + 0.4, second + 0.3]} | place]
    (fake / "ours.json").write_text(json.dumps(ours))
    wanted = "files: [ours.json, losses.json]\npairs: [[tova, 'kvpress:tova']]"
    (row,) = tables.render("language-comparisons", wanted, fake).splitlines()[2:]
    assert row.startswith("| `tova` | `kvpress:tova` | 16, 32 | -0.150 [")


def test_a_second_run_asks_only_what_is_missing(fake):
    run(fake, policies=["tova"])
    run(fake, texts=3)
    new = [one["row"] for one in asked_of(fake)[4:]]
    assert new == ["adakv-snapkv"] * 2 + ["full", "tova", "adakv-snapkv"]
    with pytest.raises(ValueError, match="written with"):
        run(fake, "--dtype", "bfloat16")


@pytest.fixture(scope="module")
def model(tiny_model):
    """A random model of two layers, 4 query heads and 2 KV heads."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()


TOKENS = torch.randint(5, 100, (LENGTH,), generator=torch.Generator().manual_seed(1))


def hooked(model, hook):
    """Return a context manager under which each layer's attention calls a hook."""

    @contextmanager
    def press(_):
        attentions = [layer.self_attn for layer in model.model.layers]
        handles = [hook(attention) for attention in attentions]
        yield
        for handle in handles:
            handle.remove()

    return press


def dropping(model, kept):
    """Return a press that keeps the places kept[layer], [H, K], as kvpress does."""

    def hook(attention):
        def forward_hook(module, inputs, kwargs, output):
            layer = kwargs["past_key_values"].layers[module.layer_idx]
            places = kept[module.layer_idx][None, :, :, None]
            places = places.expand(-1, -1, -1, layer.keys.shape[-1])
            layer.keys = layer.keys.gather(2, places)
            layer.values = layer.values.gather(2, places)

        return attention.register_forward_hook(forward_hook, with_kwargs=True)

    return hooked(model, hook)


def masked_losses(model, kept):
    """Return the losses behind AT of one forward pass that masks what is dropped."""

    def hook(attention):
        def before(module, inputs, kwargs):
            mask = torch.ones(LENGTH - 1, LENGTH - 1).tril().bool().repeat(2, 1, 1)
            is_kept = torch.zeros(2, AT, dtype=torch.bool)
            is_kept.scatter_(1, kept[module.layer_idx], True)
            mask[:, AT:, :AT] = is_kept[:, None]
            bias = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
            kwargs["attention_mask"] = bias.repeat_interleave(2, 0)[None]
            return inputs, kwargs

        return attention.register_forward_pre_hook(before, with_kwargs=True)

    with torch.inference_mode(), hooked(model, hook)(model):
        logits = model(input_ids=TOKENS[None, :-1]).logits[0, AT:]
    return cross_entropy(logits, TOKENS[AT + 1 :], reduction="none").tolist()


def kept_places(*counts):
    """Return the random places that each layer keeps, [2 heads, count] each."""
    torch.manual_seed(0)
    return [torch.rand(2, AT).topk(count).indices for count in counts]


def test_without_a_press_the_losses_are_those_of_the_whole_text(model):
    said = read(model, None, TOKENS.tolist(), AT)
    expected = masked_losses(model, kept_places(AT, AT))
    assert said["losses"] == pytest.approx(expected, abs=1e-4)
    assert said["held"] == AT


@pytest.mark.parametrize("counts", [(KEPT, KEPT), (KEPT + 6, KEPT - 6)])
def test_what_a_press_drops_is_not_seen_and_positions_stay(model, counts):
    """Also where layers hold different numbers of tokens, as under PyramidKV."""
    kept = kept_places(*counts)
    said = read(model, dropping(model, kept), TOKENS.tolist(), AT)
    assert said["losses"] == pytest.approx(masked_losses(model, kept), abs=1e-4)
    full = masked_losses(model, kept_places(AT, AT))
    assert said["losses"] != pytest.approx(full, abs=1e-2) and said["held"] == KEPT
