"""Rows of texts, of conversations and their answers, and of the reasoner."""

import json
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from reasoner.problems import held_out
from training.rows import Maker, Row, answers, read_reasoner, read_rows, render

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
    rows = read_rows(path, Maker(tokenizer, 12, "", shortest=10), 1)
    found = [tokenizer.decode(row.ids) for row in rows.training]
    assert found == [TEXT[:12], TEXT[30:40]]


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("text", b"\xff", "cannot read"),
        (
            "text.jsonl",
            b'{"text": "a"}\nno',
            "line 2: expected a JSON object with a 'text' string",
        ),
    ],
    ids=["no UTF-8", "no JSON"],
)
def test_texts_that_are_refused(
    tmp_path: Path, tokenizer, name: str, content: bytes, text: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"text: .*{text}"):
        read_rows(path, Maker(tokenizer, 10, ""), 0)


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


TAGGED = (
    "{% for message in messages %}{{ message['role'] + ': ' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}"
    "{{ message['content'] + '\n' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
# As reasoning models' templates: thoughts of earlier turns are left out.
FORGETFUL = (
    "{% for message in messages %}{{ message['role'] + ': ' }}"
    "{% if message['role'] == 'assistant' and loop.last %}{{ '<>' }}{% endif %}"
    "{{ message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
THINKING = FORGETFUL.replace("{{ 'assistant: ' }}", "{{ 'assistant: {' }}")
TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "1"},
    {"role": "user", "content": "Two and three?"},
    {"role": "assistant", "content": "2 3"},
]
CONVERSATION = (
    "system: Be brief.\nuser: One?\nassistant: 1\n"
    "user: Two and three?\nassistant: 2 3\n"
)


def tokenizer_of(folder: Path, template: str | None = None) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if template is not None:
        tokenizer.chat_template = template
    return tokenizer


def told(tokenizer: Any, ids: torch.Tensor, mask: torch.Tensor) -> str:
    """The text with all but the masked tokens blanked out."""
    assert ids.shape == mask.shape and mask.dtype == torch.bool
    return "".join(
        tokenizer.decode([index]) if taken else "_"
        for index, taken in zip(ids.tolist(), mask.tolist(), strict=True)
    )


def wanted() -> str:
    """The same for the answers of the conversation above, each with its line's end."""
    first, second = CONVERSATION.index("1\n"), CONVERSATION.index("2 3\n")
    blank = list("_" * len(CONVERSATION))
    blank[first : first + 2], blank[second : second + 4] = "1\n", "2 3\n"
    return "".join(blank)


@pytest.mark.parametrize("template", [None, TAGGED], ids=["prefixes", "tags"])
def test_answers_are_those_of_the_assistant(
    tiny_model: Path, template: str | None
) -> None:
    tokenizer = tokenizer_of(tiny_model, template)
    ids = render(TURNS, tokenizer, prompt=False)
    assert tokenizer.decode(ids) == CONVERSATION and ids.dtype == torch.int64
    assert told(tokenizer, ids, answers(TURNS, tokenizer)) == wanted()


def test_both_ways_agree_on_the_words_of_a_pretrained_tokenizer() -> None:
    """A token of more characters than one, where the borders are not told by them."""
    plain = tokenizer_of(REASONER)
    tags = plain.chat_template.replace(
        "<assistant>{{ message['content'] | trim }}{{ eos_token }}",
        "<assistant>{% generation %}{{ message['content'] | trim }}{{ eos_token }}"
        "{% endgeneration %}",
    ).replace("<assistant><think>{% endif %}", "<assistant>{% endif %}")
    tagged = tokenizer_of(REASONER, tags)
    untagged = tokenizer_of(REASONER, tags.replace("{% generation %}", ""))
    untagged.chat_template = untagged.chat_template.replace("{% endgeneration %}", "")
    asked = [{"role": "user", "content": "copy"}, {"role": "assistant", "content": "x"}]
    found = [answers(asked * 2, tokenizer) for tokenizer in (tagged, untagged)]
    assert torch.equal(*found) and found[0].any() and not found[0].all()
    ids = render(asked * 2, tagged, prompt=False)
    assert set(tagged.convert_ids_to_tokens(ids[found[0]])) == {"x", "<eos>"}


@pytest.mark.parametrize(
    ("template", "turns", "number"), [(FORGETFUL, TURNS, 3), (THINKING, TURNS[:3], 3)]
)
def test_templates_whose_answers_cannot_be_told(
    tiny_model: Path, template: str, turns: list, number: int
) -> None:
    tokenizer = tokenizer_of(tiny_model, template)
    with pytest.raises(ValueError, match=f"message {number}: .* is no beginning of"):
        answers(turns, tokenizer)


def written(folder: Path, *lines: Any) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("\n".join(json.dumps(line, ensure_ascii=False) for line in lines))
    return path


def test_a_row_counts_where_answers_are_predicted(
    tiny_model: Path, tmp_path: Path
) -> None:
    tokenizer = tokenizer_of(tiny_model)
    path = written(tmp_path, {"messages": TURNS}, {"messages": TURNS[:3]})
    rows = read_rows(path, Maker(tokenizer, 1000, "", answers_only=True), 1)
    (row,), (other,) = rows.training, rows.validation
    assert tokenizer.decode(row.ids) == CONVERSATION
    assert row.counts.tolist() == [sign != "_" for sign in wanted()[1:]] + [False]
    assert row.weight == 6 and other.weight == 2
    cut = Maker(tokenizer, CONVERSATION.index("2 3"), "", answers_only=True).of_chat(
        TURNS
    )
    assert len(cut) == CONVERSATION.index("2 3") and cut.weight == 2


def test_all_tokens_count_unless_said(tiny_model: Path, tmp_path: Path) -> None:
    """Also if the answers cannot be told; with rows of texts beside."""
    tokenizer = tokenizer_of(tiny_model, FORGETFUL)
    line = {"messages": TURNS, "source": "here"}
    odd = {"messages": [{"role": "user", "content": "a\u2028b"}]}
    path = written(tmp_path, line, {"text": "abc" * 9}, odd)
    rows = read_rows(path, Maker(tokenizer, 20, ""), 1)
    everything: list[Row] = [*rows.training, *rows.validation]
    assert [row.counts for row in everything] == [None] * 3
    texts = [tokenizer.decode(row.ids) for row in everything[:2]]
    assert texts == [CONVERSATION[:20], ("abc" * 9)[:20]]


def test_conversations_without_an_answer_are_skipped(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    maker = Maker(tokenizer_of(tiny_model), 30, "", answers_only=True)
    parts = TURNS[:2], TURNS[1:3], TURNS[:1], TURNS[1:3]
    path = written(tmp_path, *({"messages": turns} for turns in parts))
    rows = read_rows(path, maker, 1)
    assert [row.weight for row in (*rows.training, *rows.validation)] == [2, 2]
    told = "gives 2 rows and skips 2 without an answer"
    assert told in caplog.text
    with pytest.raises(ValueError, match=f"{told} at --length 30, expected more than"):
        read_rows(path, maker, 2)
