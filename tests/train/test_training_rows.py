"""Rows of tokens for the trainer of write gates."""

import json
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoTokenizer

from reasoner.problems import held_out
from reasoner.tokenizer import vocabulary
from vllm_kvpolicy.train import reasoner_rows
from vllm_kvpolicy.train.reasoner_rows import read_reasoner
from vllm_kvpolicy.train.rows import Maker, read_rows

REASONER = Path(__file__).parents[2] / "reasoner" / "checkpoint"
TEXT = "".join(chr(33 + 7 * i * i % 94) for i in range(95))


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path):
    return AutoTokenizer.from_pretrained(tiny_model)


def test_a_text_is_cut_into_rows(tmp_path: Path, tokenizer) -> None:
    path = tmp_path / "text"
    path.write_text(TEXT)
    rows = read_rows(path, Maker(tokenizer, 10, ""), 2)
    everything = [*rows.training, *rows.validation]
    assert (len(rows.training), len(rows.validation)) == (7, 2)
    assert [tokenizer.decode(row.ids) for row in everything] == [
        TEXT[start : start + 10] for start in range(0, 90, 10)
    ]
    assert all(row.ids.dtype == torch.int64 for row in everything)
    assert all(row.counts is None and row.weight == 10 for row in everything)


def test_a_line_of_jsonl_is_cut_to_one_row(tmp_path: Path, tokenizer) -> None:
    path = tmp_path / "text.jsonl"
    texts = [TEXT[:25], TEXT[:9], TEXT[30:40], TEXT[50:70]]
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    rows = read_rows(path, Maker(tokenizer, 10, ""), 1)
    found = [tokenizer.decode(row.ids) for row in rows.training]
    assert found == [TEXT[:10], TEXT[30:40]]
    assert [tokenizer.decode(row.ids) for row in rows.validation] == [TEXT[50:60]]


def test_a_chat_around_each_text(tmp_path: Path, tokenizer) -> None:
    path = tmp_path / "text"
    path.write_text(TEXT)
    rows = read_rows(path, Maker(tokenizer, 10, "Read:"), 1)
    want = f"user: Read:\n\n{TEXT[:10]}\nassistant: "
    assert tokenizer.decode(rows.training[0].ids) == want


def test_rows_come_in_another_order_each_round(tmp_path: Path, tokenizer) -> None:
    path = tmp_path / "text"
    path.write_text(TEXT)
    rows = read_rows(path, Maker(tokenizer, 10, ""), 1)
    drawn = [tokenizer.decode(row.ids) for row in islice(rows.shuffled(3), 24)]
    rounds = [drawn[:8], drawn[8:16], drawn[16:]]
    everything = {TEXT[start : start + 10] for start in range(0, 80, 10)}
    assert all(set(part) == everything for part in rounds)
    assert len({tuple(part) for part in rounds}) == 3
    again = [tokenizer.decode(row.ids) for row in islice(rows.shuffled(3), 24)]
    other = [tokenizer.decode(row.ids) for row in islice(rows.shuffled(4), 24)]
    assert drawn == again != other


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("text", TEXT[:20], "gives 2 rows at --length 10, expected more than the 2"),
        ("text", b"\xff", "cannot read"),
        (
            "text.jsonl",
            '{"text": "a"}\nno',
            "line 2: expected a JSON object with a 'text' string",
        ),
        (
            "text.jsonl",
            '{"texts": "a"}',
            "line 1: expected a JSON object with a 'text' string",
        ),
        (
            "text.jsonl",
            '{"text": 1}',
            "line 1: expected a JSON object with a 'text' string",
        ),
        ("text.jsonl", "[]", "line 1: expected a JSON object with a 'text' string"),
    ],
    ids=["few rows", "no UTF-8", "no JSON", "another key", "no text", "no object"],
)
def test_texts_that_are_refused(
    tmp_path: Path, tokenizer, name: str, content: str | bytes, text: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=f"text: .*{text}"):
        read_rows(path, Maker(tokenizer, 10, ""), 2)


def test_an_instruction_needs_a_chat_template() -> None:
    with pytest.raises(ValueError, match="has no chat template; .* --instruction ''"):
        Maker(SimpleNamespace(chat_template=None), 10, "Read:").of_text(TEXT)


@pytest.fixture(scope="module")
def reasoner_tokenizer():
    return AutoTokenizer.from_pretrained(REASONER)


def test_rows_of_the_reasoner(reasoner_tokenizer) -> None:
    rows = read_reasoner(REASONER, reasoner_tokenizer, 400, 5)
    training = list(islice(rows.shuffled(0), 10))
    assert len(rows.validation) == 5
    for row, held in [(row, True) for row in rows.validation] + [
        (row, False) for row in training
    ]:
        assert len(row) <= 400
        text = reasoner_tokenizer.decode(row.ids)
        prompt, _, rest = text.removeprefix("<bos><user>").partition("<assistant>")
        assert held_out(SimpleNamespace(prompt=prompt)) == held
        assert rest.startswith("<think>") and rest.endswith("}<eos>")
        assert "</think>\\boxed{" in rest
    assert len({tuple(row.ids.tolist()) for row in training}) == 10
    again = list(islice(rows.shuffled(0), 10))
    assert all(torch.equal(a.ids, b.ids) for a, b in zip(training, again, strict=True))
    assert not torch.equal(next(rows.shuffled(1)).ids, training[0].ids)


def test_long_rows_of_the_reasoner_come_too(reasoner_tokenizer) -> None:
    rows = read_reasoner(REASONER, reasoner_tokenizer, 4096, 1)
    lengths = [len(row) for row in islice(rows.shuffled(0), 30)]
    assert max(lengths) > 600


def test_no_problem_is_short_enough(
    monkeypatch: pytest.MonkeyPatch, reasoner_tokenizer
) -> None:
    monkeypatch.setattr(reasoner_rows, "MAX_MISSES", 50)
    with pytest.raises(ValueError, match="length: got 20, expected more: none of 50"):
        read_reasoner(REASONER, reasoner_tokenizer, 20, 1)


def test_another_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "training.json").write_text('{"lines": {"copy": 5}}')
    words = {**vocabulary(), "more": 1000}
    with pytest.raises(ValueError, match="has a different vocabulary"):
        read_reasoner(tmp_path, SimpleNamespace(get_vocab=lambda: words), 10, 1)
