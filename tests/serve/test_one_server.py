"""Every name of the package over HTTP: on one server per tier, and on one of its own.

All names where pytest is given `--every-name` (`make test-all`), else a few.
"""

import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest

from support.calibration_files import options_for
from support.servers.servers import serving
from support.servers.small_server import complete, flags, num_events
from support.sweeps import evictions
from vllm_kvpolicy.policies.names import (
    ADMISSIONS,
    ALLOCATORS,
    SELECTIONS,
    names,
    parse,
)

# Options that fit the short interval.
OPTIONS = {"expected_window": 48, "snapmax_window": 48}
ONE_PER_ALLOCATOR = ("keydiff", "ams-expected", "adakv-snapkv", "pyramid-h2o")
ONE_PER_ALLOCATOR += ("chunk-lagkv", "hard-rkv", "strat-random", "trim-snapmax")
ONE_PER_ALLOCATOR += ("wgkv+snapkv", "snapkv+quest")
pytestmark = pytest.mark.serve
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


def arguments(
    first: str, served: Iterable[str], model: Path, folder: Path, **options: object
) -> list[str]:
    """Return the arguments of a server whose own policy is the first of those served.

    A server refuses options that none of its names reads.
    """
    config = json.loads((model / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    sizes = config["num_hidden_layers"], kv_heads, heads // kv_heads
    for name in served:
        read = parse(name).options
        options |= {key: value for key, value in OPTIONS.items() if key in read}
        options |= options_for(name, folder, *sizes, config["head_dim"])
    return flags(first, 128, 64, kv_policy_config=json.dumps(options))


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
    first = next(n for n in asked if is_ragged(n) == (request.param == "ragged"))
    words = arguments(first, asked, tiny_model, folder, allow=asked)
    with serving(tiny_model, words, folder) as url:
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


@pytest.mark.slow
def test_every_name_answers(served: Served) -> None:
    assert set(served.asked) >= {n for n in ONE_PER_ALLOCATOR if not is_ragged(n)}
    lengths = {name: served.answers[name][1] for name in served.asked}
    assert lengths == dict.fromkeys(served.asked, OUTPUT_TOKENS)


@pytest.mark.slow
def test_every_name_has_events(served: Served) -> None:
    # A prompt that is kept comes on top of the budget: one event less.
    least = {n: MIN_EVENTS - parse(n).pins_prompt for n in served.asked}
    too_few = [n for n in served.asked if served.events[n] < least[n]]
    assert not too_few, served.events
    assert served.events[NO_POLICY] == 0


@pytest.mark.slow
def test_policies_change_what_is_said(served: Served) -> None:
    """Were the choice ignored, all names would answer the same."""
    texts = {served.answers[name][0] for name in served.asked}
    assert len(texts) > 1
    assert served.answers[NO_POLICY][0] not in texts or len(texts) > 2


@pytest.mark.slow
@pytest.mark.parametrize("name", evictions())
def test_it_is_served(name: str, tiny_model: Path, tmp_path: Path) -> None:
    """`vllm serve --kv-policy NAME`."""
    words = arguments(name, [name], tiny_model, tmp_path)
    with serving(tiny_model, words, tmp_path) as url:
        answer = complete(url, prompt="x" * 90, max_tokens=OUTPUT_TOKENS)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == OUTPUT_TOKENS
        assert num_events(url) >= 1


def test_one_name_per_allocator_is_listed() -> None:
    *chosen, admitted, selected = ONE_PER_ALLOCATOR
    assert {name.rpartition("-")[0] for name in chosen} == set(ALLOCATORS)
    assert admitted.partition("+")[0] in ADMISSIONS
    assert selected.rpartition("+")[2] in SELECTIONS
