"""Every name of the package on one server per tier, chosen per request over HTTP.

All names where pytest is given `--every-name` (`make test-all`), else a few.
"""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest

from support.servers.names_served import (
    FLAGS,
    ONE_PER_ALLOCATOR,
    calibration,
    options_of,
)
from support.servers.servers import serving
from vllm_kvpolicy.policies.names import names, parse

pytestmark = [pytest.mark.serve, pytest.mark.slow]
OUTPUT_TOKENS = 300
NO_POLICY = "none"
MIN_EVENTS = 3  # of budget 128, interval 64, and 90 + 300 tokens
Answers = dict[str, tuple[str, int]]


@dataclass(frozen=True)
class Served:
    """What a server gave.

    Attributes:
        asked: names of policies.
        answers: by name, asked all at once: text and number of tokens.
        events: by name, asked one after another.
    """

    asked: list[str]
    answers: Answers
    events: dict[str, float]


def is_ragged(name: str) -> bool:
    return parse(name).is_ragged({})


@pytest.fixture(scope="module", params=["equal", "ragged"])
def served(
    request: pytest.FixtureRequest,
    tiny_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Served:
    """Answers of a server of the tier to every name that it may serve."""
    every = request.config.getoption("--every-name")
    asked = [n for n in names() if not parse(n).is_test] if every else ONE_PER_ALLOCATOR
    asked = [n for n in asked if request.param == "ragged" or not is_ragged(n)]
    folder = tmp_path_factory.mktemp(request.param)
    options: dict = {**options_of(asked), "allow": asked}
    for name in asked:
        options |= calibration(name, tiny_model, folder)
    first = next(n for n in asked if is_ragged(n) == (request.param == "ragged"))
    arguments = [word for flag in FLAGS.items() for word in flag]
    arguments += ["--kv-policy", first, "--enforce-eager"]
    arguments += ["--kv-policy-config", json.dumps(options)]
    with serving(tiny_model, arguments, folder) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=300)

        def ask(name: str) -> tuple[str, int]:
            answer = client.completions.create(
                model="tiny",
                prompt="x" * 90,
                max_tokens=OUTPUT_TOKENS,
                temperature=0,
                extra_body={"ignore_eos": True, "vllm_xargs": {"kv_policy": name}},
            )
            return answer.choices[0].text, answer.usage.completion_tokens

        def events_of(name: str) -> float:
            before = num_events(url)
            ask(name)
            return num_events(url) - before

        order = [*asked, NO_POLICY]
        with ThreadPoolExecutor(8) as pool:
            answers = dict(zip(order, pool.map(ask, order), strict=True))
        return Served(asked, answers, {name: events_of(name) for name in order})


def num_events(url: str) -> float:
    """Return how many events a server has had."""
    text = httpx.get(f"{url}/metrics", timeout=30).text
    lines = [line for line in text.splitlines() if "kvpolicy_events_total{" in line]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def test_every_name_answers(served: Served) -> None:
    assert set(served.asked) >= {n for n in ONE_PER_ALLOCATOR if not is_ragged(n)}
    lengths = {name: served.answers[name][1] for name in served.asked}
    assert lengths == dict.fromkeys(served.asked, OUTPUT_TOKENS)


def test_every_name_has_events(served: Served) -> None:
    too_few = [n for n in served.asked if served.events[n] < MIN_EVENTS]
    assert not too_few, served.events
    assert served.events[NO_POLICY] == 0


def test_policies_change_what_is_said(served: Served) -> None:
    """Were the choice ignored, all names would answer the same."""
    texts = {served.answers[name][0] for name in served.asked}
    assert len(texts) > 1
    assert served.answers[NO_POLICY][0] not in texts or len(texts) > 2
