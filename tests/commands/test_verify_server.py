"""`vllm-kvpolicy verify URL` beside servers that are well, and that are not."""

import re
import subprocess
import sys

import pytest

from support.servers.policy_server import PolicyServer, serve
from vllm_kvpolicy import __main__ as command
from vllm_kvpolicy.commands import verify_server
from vllm_kvpolicy.config import KVPolicyConfig

BEFORE = "before their first event requests have the answers of the full KV cache"
ALONE = "requests are answered alone as beside others"
MEMORY, MOVED = "a policy returns memory", "tokens that were moved give the answers"
POOL, COUNTS = "all superblocks are free at the end", "counters agree with the answers"
ALL = [BEFORE, MEMORY, ALONE, f"server: {POOL}", f"server: {COUNTS}"]


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SETTLE_SECONDS", "COUNT_SECONDS"):
        monkeypatch.setattr(verify_server, name, 0.1)


def verified(fake: PolicyServer, *more: str) -> int:
    with serve(fake) as url:
        return command.main(["verify", f"{url}/v1", *more])


def results(text: str) -> dict[str, str]:
    """Return result by check of a report."""
    rows = [re.split("  +", line) for line in text.splitlines()]
    return {row[1]: row[0] for row in rows if row[0] in ("ok", "FAILED", "open")}


def test_a_healthy_server(capsys):
    fake = PolicyServer()
    assert verified(fake) == 0
    text = capsys.readouterr().out
    assert "healthy" in text and "NOT" not in text and "made" in text
    # What is installed here says nothing of the server, but for our own version.
    assert "ams-tova" in text and "torch" not in text and "vllm-kvpolicy here" in text
    found = results(text)
    assert list(found) == ALL and set(found.values()) == {"ok"}
    # Less than the server's own budget, so that short requests have events.
    asked = [body["vllm_xargs"] for body in fake.bodies]
    assert {"kv_budget": 128, "kv_interval": 64} in asked


def test_a_server_that_keeps_every_token(capsys):
    assert verified(PolicyServer(policy="identity")) == 0
    name = f"{MOVED} of the full KV cache"
    assert results(capsys.readouterr().out)[name] == "ok"


@pytest.mark.parametrize(
    ("fault", "check"),
    [
        ("answers change at once", BEFORE),
        ("answers change beside others", ALONE),
        ("returns nothing", MEMORY),
        ("leaks", f"server: {POOL}"),
        ("miscounts", f"server: {COUNTS}"),
    ],
)
def test_what_is_wrong_is_named(fault, check, capsys):
    assert verified(PolicyServer(fault)) == 1
    text = capsys.readouterr().out
    assert results(text)[check] == "FAILED" and "NOT HEALTHY" in text


@pytest.mark.parametrize(
    ("fake", "names", "why"),
    [
        (
            PolicyServer("does not repeat itself"),
            [BEFORE, ALONE],
            "full KV caches do not give the same twice",
        ),
        (PolicyServer("is asked by others"), ALL, "other requests used the server"),
        (PolicyServer("is asked by others", "leaks"), ALL, "other requests used"),
        (PolicyServer("others run"), ALL, "1 other requests used the server"),
        (PolicyServer("counts elsewhere"), ALL, "are not in its metrics"),
        (PolicyServer(policy="quest"), [MEMORY], "without a scorer it may keep every"),
        # The least budget that the server names leaves no room for an event.
        (
            PolicyServer(budget=2048, least=2000),
            [MEMORY, ALONE],
            "requests of 688 tokens have no event here",
        ),
    ],
    ids=lambda value: (
        " ".join((*value.faults, value.policy, str(value.least)))
        if isinstance(value, PolicyServer)
        else ""
    ),
)
def test_what_cannot_be_judged_is_left_open(fake, names, why, capsys):
    assert verified(fake) == 0
    text = capsys.readouterr().out
    found = results(text)
    assert [name for name, result in found.items() if result == "open"] == names
    assert why in text and "NOT HEALTHY" not in text and "nothing failed" in text


def test_the_least_budget_that_a_server_names(capsys):
    fake = PolicyServer(least=164)
    assert verified(fake) == 0
    assert set(results(capsys.readouterr().out).values()) == {"ok"}
    asked = [body["vllm_xargs"] for body in fake.bodies]
    assert {"kv_budget": 164, "kv_interval": 64} in asked


@pytest.mark.parametrize(
    ("values", "keys", "pattern", "told"),
    [
        ({}, verify_server.UNKNOWN, verify_server.OWN_POLICY, "expected"),
        ({"recent": 128}, {"kv_budget": 128}, verify_server.LEAST, "148"),
        ({}, {"kv_interval": 64}, verify_server.LEAST, "128"),
    ],
)
def test_what_is_read_from_refusals_is_there(values, keys, pattern, told):
    config = KVPolicyConfig.from_dict({"policy": "expected", **values})
    with pytest.raises(ValueError) as refused:
        config.with_request(keys, block_size=16)
    found = pattern.search(str(refused.value))
    assert found is not None and found[1] == told


def test_a_server_that_dies_is_reported(capsys):
    assert verified(PolicyServer("dies in an event")) == 1
    text = capsys.readouterr().out
    assert results(text) == {"the server answers": "FAILED"}
    assert "engine is dead" in text and "NOT HEALTHY" in text


@pytest.mark.parametrize("name", ["verify_server", "verify"])
def test_a_url_needs_no_vllm(name):
    module = f"vllm_kvpolicy.commands.{name}"
    code = f"import sys; sys.modules['vllm'] = None; import {module}"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_servers_that_cannot_be_asked(capsys):
    assert verified(PolicyServer("has no policy")) == 2
    assert "expected a server with --kv-policy" in capsys.readouterr().err
    assert verified(PolicyServer(api_key="secret")) == 2
    assert "HTTP 401" in capsys.readouterr().err
    assert verified(PolicyServer(api_key="secret"), "--api-key", "secret") == 0
    assert command.main(["verify", "http://127.0.0.1:9"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("vllm-kvpolicy verify: error: http://127.0.0.1:9: no a")
    assert command.main(["verify", "http://HOST:PORT"]) == 2
    assert "nonnumeric port" in capsys.readouterr().err
    assert verified(PolicyServer("is no vLLM")) == 2
    assert "expected vLLM's data.0.id" in capsys.readouterr().err
    assert verified(PolicyServer(longest=256)) == 2
    assert "max_model_len: got 256" in capsys.readouterr().err


@pytest.mark.parametrize("flag", [("--kv-budget", "128"), ("--dtype", "float32")])
def test_a_server_has_its_own_flags(flag, capsys):
    with pytest.raises(SystemExit):
        command.main(["verify", "http://127.0.0.1:9", *flag])
    assert "leave them out with a URL" in capsys.readouterr().err
