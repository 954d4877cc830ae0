"""Every name of the catalogue on one server per tier, chosen per request over HTTP.

All names where pytest is given `--every-name` (`make test-all`), else a few.
"""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest
from test_every_name import FLAGS, ONE_PER_ALLOCATOR, OPTIONS, calibration

from support.servers.servers import serving
from vllm_kvpolicy.policies.catalogue.names import names, parse

pytestmark = pytest.mark.serve
OUTPUT_TOKENS = 300
NO_POLICY = "none"
Answers = dict[str, tuple[str, int]]


def is_ragged(name: str) -> bool:
    return parse(name).is_ragged({})


@pytest.fixture(scope="module", params=["equal", "ragged"])
def served(
    request: pytest.FixtureRequest,
    tiny_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[list[str], Answers]]:
    """Names that a server of the tier answers, and text and length of its answers."""
    every = request.config.getoption("--every-name")
    asked = [n for n in names() if not parse(n).is_test] if every else ONE_PER_ALLOCATOR
    asked = [n for n in asked if request.param == "ragged" or not is_ragged(n)]
    folder = tmp_path_factory.mktemp(request.param)
    options: dict = {**OPTIONS, "allow": asked}
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

        with ThreadPoolExecutor(8) as pool:
            order = [*asked, NO_POLICY]
            yield asked, dict(zip(order, pool.map(ask, order), strict=True))


def test_every_name_answers(served: tuple[list[str], Answers]) -> None:
    asked, answers = served
    assert set(asked) >= {n for n in ONE_PER_ALLOCATOR if not is_ragged(n)}
    lengths = {name: answers[name][1] for name in asked}
    assert lengths == dict.fromkeys(asked, OUTPUT_TOKENS)


def test_policies_change_what_is_said(served: tuple[list[str], Answers]) -> None:
    """Were the choice ignored, all names would answer the same."""
    asked, answers = served
    texts = {answers[name][0] for name in asked}
    assert len(texts) > 1
    assert answers[NO_POLICY][0] not in texts or len(texts) > 2
