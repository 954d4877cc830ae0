"""The prefix cache of a server with a policy, as its clients and operators see it."""

import re
from pathlib import Path

import httpx
import openai
import pytest

from support.servers.names_served import FLAGS
from support.servers.servers import serving

pytestmark = pytest.mark.serve
BLOCK, WINDOW = 32, 32  # of the CPU, of AMS
PROMPT = "".join(chr(97 + (7 * index + index // 9) % 26) for index in range(200))


def series(url: str, name: str) -> float:
    """Return the sum of a series on /metrics."""
    text = httpx.get(f"{url}/metrics", timeout=30).text
    values = re.findall(rf"^vllm:{name}{{.*}} (\S+)$", text, re.MULTILINE)
    assert values, name
    return sum(map(float, values))


def test_hits_are_counted_and_salts_keep_requests_apart(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("cache")
    arguments = [word for flag in FLAGS.items() for word in flag]
    arguments += ["--kv-policy", "ams-tova", "--enforce-eager"]
    arguments += ["--enable-prompt-tokens-details"]
    with serving(tiny_model, arguments, folder) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=300)

        def ask(prompt: str, **extra: object) -> tuple[str, int]:
            before = series(url, "prefix_cache_hits_total")
            answer = client.completions.create(
                model="tiny",
                prompt=prompt,
                max_tokens=150,
                temperature=0,
                extra_body={"ignore_eos": True, **extra},
            )
            hits = series(url, "prefix_cache_hits_total") - before
            details = answer.usage.prompt_tokens_details
            assert (details.cached_tokens if details else 0) == hits
            return answer.choices[0].text, int(hits)

        # An event ends the prompt of 200 and reads its last 32 queries.
        usable = (len(PROMPT) - WINDOW) // BLOCK * BLOCK
        cold, hits = ask(PROMPT)
        assert hits == 0
        assert ask(PROMPT) == (cold, usable)
        # A second turn finds the whole prompt of the first.
        assert ask(PROMPT + cold[:100])[1] == 192
        assert ask(PROMPT, cache_salt="mine") == (cold, 0)
        assert ask(PROMPT, cache_salt="mine") == (cold, usable)
        # Requests without the policy and with a smaller budget share all the same.
        assert ask(PROMPT, vllm_xargs={"kv_policy": "none"})[1] == 192
        assert ask(PROMPT, vllm_xargs={"kv_budget": 96})[1] == usable
        assert series(url, "kv_cache_usage_perc") == 0
