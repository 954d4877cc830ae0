"""Tests of the language benchmark's two questions about one text."""

from types import SimpleNamespace

import pytest

from benchmarks.language import parts
from benchmarks.language.engines import Asker
from benchmarks.language.tasks import Problem

TEXT = tuple(range(100, 140))
ITEM = Problem("keys-40-1", "keys-40", TEXT, (((1, 2), (3, 4)), ((5,), (6, 7))))
PART = parts.PARTS["turns"]


class Script(Asker):
    """Answers the last token of a prompt from a table and remembers what was asked."""

    def __init__(self, **answers: list[int]) -> None:
        super().__init__(None, 8)
        self.answers = answers
        self.asked: list[tuple[tuple[int, ...], str]] = []

    def ask(self, prompts, policy, budget, salts=(), **sampling):
        """Return the answer to each prompt's last question."""
        assert sampling["ignore_eos"]
        for prompt, salt in zip(prompts, salts, strict=True):
            self.asked.append((tuple(prompt), salt))
        return [
            SimpleNamespace(
                outputs=[
                    SimpleNamespace(token_ids=self.answers[f"after_{prompt[-1]}"])
                ],
                num_cached_tokens=30 if "talk" in salt else 0,
            )
            for prompt, salt in zip(prompts, salts, strict=True)
        ]


def test_the_second_question_follows_what_was_answered():
    script = Script(after_2=[3, 9], after_5=[6, 7])
    (found,) = PART.measure(script, "tova", 16, [ITEM])
    first, second, alone = (prompt for prompt, _ in script.asked)
    assert first == (*TEXT, 1, 2)
    assert second == (*TEXT, 1, 2, 3, 9, 5)
    assert alone == (*TEXT, 5)
    kept = PART.figures(found, 16, 8)
    assert kept == {
        "first_right": 0,
        "second_right": 1,
        "alone_right": 1,
        "cached": pytest.approx(30 / 45, abs=1e-4),
    }
    assert set(kept) == set(PART.names)


def test_only_a_conversation_of_one_policy_and_budget_shares_a_cache():
    script = Script(after_2=[3, 4], after_5=[0, 0])
    for policy, budget in (("tova", 16), ("tova", 24), ("snapkv", 16)):
        PART.measure(script, policy, budget, [ITEM])
    salts = [salt for _, salt in script.asked]
    assert len(set(salts)) == 6
    assert salts[0] == salts[1] != salts[2]
