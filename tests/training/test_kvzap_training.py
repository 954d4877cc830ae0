"""Training of KVzap's surrogates on a tiny model: targets, both kinds, and files."""

import json
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from support import training_rows
from training import kvzap
from training.kvzap import Reader, Samples, around, figures_of, linear, mlp
from training.model import load_base
from training.rows import Row
from vllm_kvpolicy.policies.admissions.kvzap import Surrogate, load

CPU = torch.device("cpu")
BEFORE, BETWEEN = [5, 6], [7, 8, 9]
IDS = training_rows.ids(20)


@pytest.fixture(params=["tiny_model", "tiny_llama"])
def folder(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(request.param)


def plain_scores(folder: Path, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What attention is given and the scores, of transformers' own attention weights.

    Returns:
        [P, L, d] and [P, L, H].
    """
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    given: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda module, args, named: given.append(named["hidden_states"][0]),
            with_kwargs=True,
        )
    read = torch.tensor([[*BEFORE, *ids, *BETWEEN, *ids]])
    with torch.no_grad():
        out = model(read, output_attentions=True)
        size, count = out.past_key_values.layers[0].values.shape[-1], len(ids)
        scores = torch.zeros(count, len(given), 2)
        for layer, module in enumerate(model.model.layers):
            value = out.past_key_values.layers[layer].values[0]
            for head in range(4):
                part = slice(head * size, (head + 1) * size)
                written = value[head // 2] @ module.self_attn.o_proj.weight[:, part].T
                for place in range(count):
                    key = len(BEFORE) + place
                    looked = [
                        out.attentions[layer][0, head, query, key]
                        * written[key].norm()
                        / given[layer][query].norm()
                        for query in range(read.shape[1] - count, read.shape[1])
                    ]
                    known = scores[place, layer, head // 2]
                    scores[place, layer, head // 2] = max(known, *looked)
    text = slice(len(BEFORE), len(BEFORE) + count)
    return torch.stack(given, 1)[text], scores.log()


def test_samples_are_those_of_plain_attention(folder: Path, tmp_path: Path) -> None:
    """Of tokens that are drawn anew for each text."""
    base = load_base(str(folder), "cpu", torch.float32)
    reader = Reader(base, BEFORE, BETWEEN, 8, 42, tmp_path)
    drawn = []
    for ids in (IDS, IDS.flip(0)):
        got = reader.samples([Row(ids)], "text")
        hidden, scores = plain_scores(folder, ids)
        gaps = (got.hidden[:, None, -1] - hidden[None, :, -1]).abs().amax(-1)
        chosen = gaps.argmin(1)
        assert (gaps.amin(1) < 1e-4).all() and len(set(chosen.tolist())) == 8
        torch.testing.assert_close(got.hidden, hidden[chosen], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(got.scores, scores[chosen], rtol=1e-4, atol=1e-4)
        drawn.append(set(chosen.tolist()))
    assert drawn[0] != drawn[1]


def test_texts_that_were_read_are_not_read_again(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reader(seed: int = 42, model: Path = tiny_model) -> Reader:
        base = load_base(str(model), "cpu", torch.float32)
        return Reader(base, BEFORE, BETWEEN, 8, seed, tmp_path)

    first = reader().samples([Row(IDS)], "text")
    again = reader()
    with monkeypatch.context() as patch:
        patch.setattr(Reader, "_read", None)
        got = again.samples([Row(IDS)], "text")
        assert torch.equal(got.scores, first.scores)
        with pytest.raises(TypeError):
            again.samples([Row(IDS + 1)], "text")
        again.base.decoder.norm.weight.mul_(2)  # as other weights have
        with pytest.raises(TypeError):
            again.samples([Row(IDS)], "text")
    assert not torch.equal(reader(7).samples([Row(IDS)], "text").scores, first.scores)


def test_the_request_stands_between_a_text_and_itself(tiny_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    before, between = map(tokenizer.decode, around(tokenizer))
    messages = [
        {"role": "user", "content": "abc\n\nRepeat the previous context exactly."},
        {"role": "assistant", "content": "abc"},
    ]
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    assert whole.startswith(f"{before}abc{between}abc")
    tokenizer.chat_template = None
    before, between = map(tokenizer.decode, around(tokenizer))
    assert before == "" and between == f"{kvzap.REQUEST}\n\n"


@pytest.fixture(scope="module")
def planted() -> Iterator[Samples]:
    """Scores of the first layer are linear in hidden states, of the second not."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(4000, 2, 6, generator=generator)
    scores = torch.stack([hidden[:, 0, :2] * 3 - 4, hidden[:, 1, :2].abs() * 2], 1)
    return Samples(hidden, scores)


def surrogate(tensors: dict[str, torch.Tensor], units: int | None) -> Surrogate:
    return Surrogate(2, 6, 2, units, tensors)


def test_ridge_finds_what_is_linear(planted: Samples) -> None:
    made = surrogate(linear(planted), None)
    want = torch.zeros(2, 6)
    want[:, :2] = 3 * torch.eye(2)
    weight, bias = made.linears(0)[0]
    torch.testing.assert_close(weight, want, rtol=0, atol=5e-3)
    torch.testing.assert_close(bias, torch.full((2,), -4.0), rtol=0, atol=5e-3)
    assert made.linears(1)[0][1].mean() == pytest.approx(2 * (2 / torch.pi) ** 0.5, 0.1)


def test_hidden_units_find_the_rest(planted: Samples) -> None:
    options = Namespace(
        hidden_units=16, epochs=15, batch=64, learning_rate=5e-3, seed=0
    )
    by_kind = [
        figures_of(surrogate(tensors, units), planted)
        for tensors, units in (
            (linear(planted), None),
            (mlp(planted, options, CPU), 16),
        )
    ]
    assert by_kind[0]["r2_by_layer"][0] > 0.999 and by_kind[0]["r2_by_layer"][1] < 0.1
    assert min(by_kind[1]["r2_by_layer"]) > 0.9
    found = by_kind[1]
    assert found["r2"] == pytest.approx(sum(found["r2_by_layer"]) / 2, abs=1e-5)


def test_thresholds_keep_their_share(planted: Samples) -> None:
    made = surrogate(linear(planted), None)
    scores = torch.stack(
        [
            planted.hidden[:, i] @ made.linears(i)[0][0].T + made.linears(i)[0][1]
            for i in (0, 1)
        ]
    )
    for share, threshold in figures_of(made, planted)["thresholds"].items():
        kept = (scores >= threshold).float().mean().item()
        assert kept == pytest.approx(float(share), abs=1e-3)


def test_the_command_writes_what_servers_read(
    tmp_path: Path, on_text: list[str]
) -> None:
    output = tmp_path / "out"
    command = [*on_text, "--length", "40", "--shortest", "40"]
    command += ["--tokens-per-text", "30", "--texts", "6"]
    command += ["--validation-rows", "2", "--hidden-units", "8"]
    kvzap.main([*command, "--device", "cpu", "--dtype", "float32"])
    content = json.loads((output / "figures.json").read_text())
    assert content["texts"] == 6 and len(list((output / "samples").iterdir())) == 8
    for kind, units in (("linear", None), ("mlp", 8)):
        made = load(output / kind)
        assert made.num_units == units
        assert (made.num_layers, made.num_kv_heads) == (2, 2)
        assert set(content[kind]) == {"r2", "r2_by_layer", "thresholds"}
