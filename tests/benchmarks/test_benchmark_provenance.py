"""Tests of what a result says of the machine that made it."""

import sys

import pytest

from benchmarks import provenance


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("/a/machine/model", "model"),
        ("/a/my machine/model", "model"),
        ("--model=/a/machine/model", "--model=model"),
        ("--model=/a/my machine/model", "--model=model"),
        ("--serve-args=--chat /a/b.jinja -x", "--serve-args=--chat b.jinja -x"),
        ("--chat-template /a/b.jinja --seed 1", "--chat-template b.jinja --seed 1"),
        ('{"trace": "/a/b", "x": ["/a/c"]}', '{"trace": "b", "x": ["c"]}'),
        ("runs/accuracy.jsonl", "runs/accuracy.jsonl"),
        ("http://host:8000/v1", "http://host:8000/v1"),
        ("1/4", "1/4"),
    ],
)
def test_no_folder_of_this_machine_is_in_a_command(monkeypatch, word, expected):
    assert provenance.redacted(word) == expected
    monkeypatch.setattr(sys, "argv", ["/x/y", word])
    assert "/a/" not in provenance.collect("benchmarks.report")["command"]
