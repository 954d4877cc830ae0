"""Tests of the comparison of requests at once: its servers, requests, and arithmetic.

The whole way with real servers takes minutes on two cores and is not run here:

    python -m benchmarks.admission --pairs 1 --problems 1
"""

import json
from pathlib import Path

import pytest

from benchmarks import admission
from benchmarks.server import Server
from support.servers.chat_server import ChatServer, serve

GAUGES = {admission.RUNNING: 0.0, admission.WAITING: 0.0, admission.USAGE: 0.0}


def arguments(model, *words: str):
    return admission.parse_args(["--model", str(model), *words])


def sample(steps, request_steps, running=0, waiting=0, **counters) -> dict:
    """Return /metrics; `counters` are series without `kvpolicy_` and `_total`."""
    counters |= {"steps": steps, "request_steps": request_steps}
    return {
        **GAUGES,
        **{f"kvpolicy_{name}_total": float(value) for name, value in counters.items()},
        admission.RUNNING: float(running),
        admission.WAITING: float(waiting),
        admission.PREEMPTIONS: counters.get("preempted", 0.0),
    }


def test_servers_differ_in_the_policy_alone(tiny_model):
    servers = admission.servers_of(arguments(tiny_model, "--gates", "g.safetensors"))
    ours, stock = servers["wgkv"], servers["stock"]
    common = stock[: stock.index("--scheduler-cls")]
    assert ours[: len(common)] == common
    for word in ("--num-gpu-blocks-override", "--block-size", "--max-num-seqs"):
        assert word in common
    assert "--no-enable-prefix-caching" in common
    assert ours[len(common) :] == [
        *("--kv-policy", "wgkv", "--kv-recent", "32", "--kv-interval", "64"),
        *("--kv-policy-config", json.dumps({"wgkv_gates": "g.safetensors"})),
    ]
    with pytest.raises(ValueError, match="blocks: got 32, expected at least 33"):
        admission.servers_of(arguments(tiny_model, "--blocks", "32"))


def test_requests_at_once_count_while_others_wait():
    """The ramp at both ends, where nobody waits, is not the pool's doing."""
    samples = [
        sample(10, 10, tokens_left=0, tokens_dropped=0, block_steps=100),
        sample(20, 20, running=1, block_steps=110),
        sample(30, 60, running=5, waiting=2, block_steps=200),
        sample(40, 90, running=3, waiting=0, block_steps=300),
        sample(50, 160, running=7, waiting=1, block_steps=700),
        sample(90, 170, tokens_left=8, tokens_dropped=6, block_steps=900, preempted=4),
    ]  # fmt: skip
    lines = [
        {"output_tokens": 60, "correct": True},
        {"output_tokens": 40, "correct": 0},
    ]
    found = admission.figures(lines, 5.0, samples)
    assert found["mean_running"] == (160 - 60) / (50 - 30)
    assert (found["most_running"], found["preemptions"], found["steps"]) == (7, 4, 80)
    assert found["held_blocks"] == 800 / 160
    assert found["kept_fraction"] == 0.25
    assert (found["output_tok_s"], found["right"]) == (20.0, 1)
    assert found["usage_left"] == 0


def test_a_round_over_http(tiny_model, monkeypatch):
    args = arguments(tiny_model, "--tasks", "copy:5", "--problems", "2")
    asked = admission.asked_of(args, 0)
    fake = ChatServer()
    gauges = GAUGES | {admission.PREEMPTIONS: 0.0}
    original = Server.metrics
    monkeypatch.setattr(Server, "metrics", lambda self: gauges | original(self))
    with serve(fake) as url:
        server = Server("wgkv", (), url, Path(), None)  # type: ignore[arg-type]
        found = admission.measure(server, asked, 50)
        assert fake.most_at_once == 2 and found["steps"] == 10
        assert found["output_tokens"] == sum(
            len(f"\\boxed{{{one.question.prompt}}}") for one in asked
        )
        fake.faults[asked[0].question.prompt] = [400]
        with pytest.raises(admission.LoadError, match="wgkv: copy:5 .*HTTP 400"):
            admission.measure(server, asked, 50)
