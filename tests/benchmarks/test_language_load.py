"""Tests of the language benchmark's questions within long answers."""

import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import reasoner
from benchmarks.language import load, losses, parts
from benchmarks.language.__main__ import parse_args
from benchmarks.language.engines import Asker, Settings, engines_of, running
from benchmarks.language.tasks import CHOSEN, PIECE, Problem
from benchmarks.language.texts import BOOK_NAMES, Text

CHECKPOINT = Path(reasoner.__file__).parent / "checkpoint"
ASKED = (((1, 2), (3, 4)), ((5,), (6, 7)))
PART = parts.PARTS["load"]


def told() -> load.Told:
    """Return a short text with two questions in its answer."""
    problem = Problem("keys-40-1", "keys-40", tuple(range(100, 140)), ASKED)
    return load._told(problem, [tuple(range(200, 200 + 2 * load.STRETCH))])


def logged(value: float) -> SimpleNamespace:
    """Return what vLLM says of a token's probability."""
    return SimpleNamespace(logprob=float(value))


class Script(Asker):
    """Gives the tokens that are forced; those of ranks above 1 have a better one."""

    def __init__(self, ranks: dict[int, int]) -> None:
        super().__init__(None, 8)
        self.ranks = ranks
        self.wrong: tuple[int, ...] = ()

    def ask(self, prompts, policy, budget, salts=(), forced=(), **sampling):
        """Return each answer, with -log p of a token its rank."""
        return [
            SimpleNamespace(
                outputs=[
                    SimpleNamespace(
                        token_ids=list(self.wrong or answer),
                        logprobs=[
                            {token: logged(-rank)}
                            | ({-1: logged(0)} if rank > 1 else {})
                            for token in answer
                            for rank in [self.ranks.get(token, 1)]
                        ],
                    )
                ],
                kv_transfer_params={"kv_policy": {"dropped": [[40, 20.0, 1]]}},
            )
            for answer in forced
        ]


def test_questions_stand_behind_stretches_of_a_book():
    one = told()
    first, second = one.scored
    assert one.said_ids[slice(*first)] == (3, 4)
    assert one.said_ids[slice(*second)] == (6, 7)
    book = tuple(range(200, 200 + 2 * load.STRETCH))
    assert one.said_ids[: load.STRETCH + 2] == (*book[: load.STRETCH], 1, 2)
    assert one.said_ids[first[1] : second[0]] == (*book[load.STRETCH :], 5)


def test_an_answer_is_right_if_each_of_its_tokens_is_the_most_probable():
    script = Script({4: 2, 5: 9, 210: 9})
    (found,) = PART.measure(script, "tova", 16, [told()])
    kept = PART.figures(found, 16, 8)
    assert kept["right"] == 0.5
    assert kept["loss"] == pytest.approx((1.5 + 1) / 2)
    positions = np.arange(39, len(told().token_ids) - 1)
    read = sum(p + 1 - 20 * (p >= 40) for p in positions)
    assert kept["held"] == pytest.approx(read / sum(positions + 1), abs=1e-4)
    assert {*PART.names, "held"} == set(kept)


def test_other_tokens_than_forced_are_an_error():
    script = Script({})
    script.wrong = (1, 2)
    with pytest.raises(RuntimeError, match="other tokens"):
        PART.measure(script, "tova", 16, [told()])


def test_every_chosen_task_of_the_length_is_asked():
    rng = random.Random(0)
    texts = [
        Text(f"{kind}-1", kind, tuple(rng.choices([3, 8, 9], k=PIECE)))
        for kind in BOOK_NAMES
    ]

    def encode(words: str) -> list[int]:
        return [3 if words == "\n" else 7] * min(len(words), 3)

    found = load.chosen(encode, texts, 2)
    assert {one.kind for one in found} == {
        f"{task}-{load.LENGTH}" for task, some in CHOSEN.items() if load.LENGTH in some
    }
    assert len({one.id for one in found}) == 2 * len({one.kind for one in found})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--parts", "load"], "pool-share"),
        (["--parts", "tasks", "--pool-share", "0.5"], "pool-share"),
        (["--parts", "tasks", "--events", "pressure"], "events"),
        (["--parts", "load", "turns", "--pool-share", "0.5"], "alone"),
    ],
)
def test_a_small_pool_is_for_this_part_alone(words, message, capsys):
    with pytest.raises(SystemExit):
        parse_args(["--policies", "tova", *words])
    assert message in capsys.readouterr().err


def test_forced_tokens_are_scored_as_those_of_a_prompt_are():
    rng = random.Random(0)
    texts = [
        Text(f"made-{n}", "made", tuple(rng.randrange(10, 90) for _ in range(400)))
        for n in range(4)
    ]
    items = [
        load.Told(one.id, "made", one.token_ids[:200], one.token_ids[200:], ((0, 200),))
        for one in texts
    ]
    crowded = Settings(
        CHECKPOINT,
        "float32",
        420,
        4,
        (96,),
        (32,),
        as_served=True,
        events="pressure",
        pool_share=0.4,
    )
    found, scored = {}, []
    for engine in engines_of(["full", "tova"], (32,), is_alone=True):
        with running(engine, crowded) as asker:
            (name,) = engine.policies
            found[name] = load.measure(asker, name, 96, items)
            if name == "full":  # one by one they fit
                scored = [losses.measure(asker, name, 96, [one])[0] for one in texts]
    for whole, full in zip(scored, found["full"], strict=True):
        assert full.losses[0] == pytest.approx(whole.losses[199:].mean(), rel=1e-4)
        assert full.held == 1
    assert all(96 / 400 < one.held < 1 for one in found["tova"])
    for whole, cut in zip(scored, found["tova"], strict=True):
        assert cut.losses[0] != pytest.approx(whole.losses[199:].mean(), rel=1e-4)
