"""Every command of docs/recipes.md is one that vLLM, or the package, takes."""

import ast
import json
import re
import shlex
from argparse import ArgumentParser
from pathlib import Path

import pytest

from support.vllm_flags import serve_flags
from vllm_kvpolicy.api import cli
from vllm_kvpolicy.config import KVPolicyConfig

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "recipes.md").read_text()
# Indented lines, with those that a backslash continues.
COMMANDS = [
    shlex.split(text.replace("\\\n", " "))
    for text in re.findall(r"^    (vllm (?:.*\\\n)*.*)$", PAGE, re.MULTILINE)
]
SERVERS = [words[2:] for words in COMMANDS if words[1] == "serve"]
CLIENTS = [words[3:] for words in COMMANDS if words[1:3] == ["bench", "serve"]]


@pytest.mark.parametrize("words", SERVERS, ids=range(len(SERVERS)))
def test_servers_start_with_flags_that_vllm_takes(words: list[str]) -> None:
    args = serve_flags(words)
    assert args.model_tag == "$MODEL"
    merged = cli.merge(args.additional_config, cli.given_values(vars(args)))
    config = KVPolicyConfig.from_dict(merged["kv_policy"])
    config.validate_block_size(32)
    assert config.events == "pressure"


@pytest.mark.parametrize("words", CLIENTS, ids=range(len(CLIENTS)))
def test_clients_ask_with_flags_that_vllm_takes(words: list[str]) -> None:
    from vllm.benchmarks.serve import add_cli_args

    parser = ArgumentParser(exit_on_error=False)
    add_cli_args(parser)
    args, unknown = parser.parse_known_args(words)
    assert not unknown
    assert (args.model, args.tokenizer) == ("m", "$MODEL")
    for goal in args.goodput or ():
        assert re.fullmatch(r"(?:ttft|tpot|e2el):\d+", goal)


def test_requests_are_json_and_programs_are_python() -> None:
    bodies = re.findall(r"-d '(\{.*?\})'\n", PAGE, re.DOTALL)
    assert [json.loads(body)["model"] for body in bodies] == ["m"]
    programs = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(programs) == 2 and all(ast.parse(program).body for program in programs)
