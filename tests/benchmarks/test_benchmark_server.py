"""Tests of server processes: metrics text, command lines, start and stop."""

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.provenance import ROOT
from benchmarks.server import Server, ServerError, parse_metrics, running

METRICS = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="model"} 3.0
# TYPE vllm:request_success counter
vllm:request_success_total{engine="0",finished_reason="stop"} 2.0
vllm:request_success_total{engine="0",finished_reason="length"} 5.0
vllm:request_success_created{engine="0",finished_reason="stop"} 1.7e+09
# TYPE vllm:iteration_tokens_total histogram
vllm:iteration_tokens_total_bucket{engine="0",le="1.0"} 10.0
vllm:iteration_tokens_total_bucket{engine="0",le="+Inf"} 12.0
vllm:iteration_tokens_total_count{engine="0"} 12.0
vllm:iteration_tokens_total_sum{engine="0"} 90.0
"""


def test_parse_metrics_sums_over_labels_and_skips_buckets():
    assert parse_metrics(METRICS) == {
        "vllm:num_requests_running": 3.0,
        "vllm:request_success_total": 7.0,
        "vllm:iteration_tokens_total_count": 12.0,
        "vllm:iteration_tokens_total_sum": 90.0,
    }


def put_vllm(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Put a Python script in the place of `vllm`."""
    path = folder / "vllm"
    path.write_text(f"#!{sys.executable}\n{script}")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))


HEALTHY = """
import os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"offline_hub %s\\n" % os.environ["HF_HUB_OFFLINE"].encode())
        self.wfile.write(b"given %s\\n" % os.environ.get("GIVEN", "0").encode())
print(sys.argv[1:], flush=True)
port = int(sys.argv[sys.argv.index("--port") + 1])
HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def test_servers_run_together_and_are_stopped(tmp_path, monkeypatch):
    put_vllm(tmp_path, monkeypatch, HEALTHY)
    words = {"one": ["a"], "two": ["b", "--flag"]}
    with running(words, tmp_path, environment={"GIVEN": "7"}) as servers:
        assert list(servers) == ["one", "two"]
        assert servers["one"].url != servers["two"].url
        assert all(server.is_healthy() for server in servers.values())
        for each in servers.values():
            assert each.metrics() == {"offline_hub": 1.0, "given": 7.0}
    assert all(server.process.poll() is not None for server in servers.values())
    assert "['serve', 'b', '--flag'" in servers["two"].log.read_text()


def test_a_dead_server_is_reported_with_its_log(tmp_path, monkeypatch):
    put_vllm(tmp_path, monkeypatch, "raise SystemExit('the pool is too small')")
    message = "one: exited with status 1; the log ends with\nthe pool is too small"
    with pytest.raises(ServerError, match=message), running({"one": []}, tmp_path):
        pass


def test_servers_may_fail_where_failures_are_asked_for(tmp_path, monkeypatch):
    script = f"import sys\nif 'bad' in sys.argv: raise ValueError('no room')\n{HEALTHY}"
    put_vllm(tmp_path, monkeypatch, script)
    failures: dict[str, str] = {}
    asked = {"one": ["bad"], "two": ["good"]}
    with running(asked, tmp_path, failures) as servers:
        assert list(servers) == ["two"] and servers["two"].is_healthy()
    assert failures == {"one": "one: exited with status 1: ValueError: no room"}
    with (
        pytest.raises(ServerError, match="no server started:\none: exited with"),
        running({"one": ["bad"]}, tmp_path, {}),
    ):
        pass


def test_a_silent_server_is_reported(tmp_path, monkeypatch):
    put_vllm(tmp_path, monkeypatch, "import time; time.sleep(60)")
    monkeypatch.setattr(Server.wait_until_healthy, "__defaults__", (0.1,))
    with (
        pytest.raises(ServerError, match="one: no answer after 0 s"),
        running({"one": []}, tmp_path),
    ):
        pass


def test_a_program_that_is_terminated_stops_its_servers(tmp_path, monkeypatch):
    python = sys.executable
    put_vllm(tmp_path, monkeypatch, HEALTHY)
    program = (
        "import sys, time; from pathlib import Path\n"
        f"folder = Path({str(tmp_path)!r})\n"
        "sys.executable = str(folder / 'python')\n"
        "from benchmarks.server import running\n"
        "with running({'one': []}, folder) as servers:\n"
        "    print(servers['one'].process.pid, flush=True)\n"
        "    time.sleep(60)\n"
    )
    command = [python, "-c", program]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as made:
        server = int(made.stdout.readline())
        os.kill(server, 0)
        made.terminate()
        assert made.wait(30) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(server, 0)
