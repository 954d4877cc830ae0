"""`vllm-kvpolicy verify URL` beside a real server."""

from pathlib import Path

import pytest

from support.servers.names_served import FLAGS
from support.servers.servers import serving
from vllm_kvpolicy import __main__ as command

pytestmark = pytest.mark.serve


def test_a_healthy_server(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    arguments = [word for flag in FLAGS.items() for word in flag]
    arguments += ["--kv-policy", "ams-tova", "--enforce-eager"]
    arguments += ["--kv-policy-config", '{"report_events": true}']
    with serving(tiny_model, arguments, tmp_path) as url:
        status = command.main(["verify", url])
    text = capsys.readouterr().out
    assert status == 0 and "healthy (" in text, text
    states = [line.split("  ")[0] for line in text.splitlines()]
    assert states.count("ok") == 5 and "open" not in states, text
    assert "events counted" in text and "vllm of the server  0.32" in text
