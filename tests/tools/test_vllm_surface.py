"""The command that judges a release of vLLM: its records, its wheels, its status."""

import json
import re
from pathlib import Path
from zipfile import ZipFile

import pytest

from tools.vllm_surface import __main__ as surface
from tools.vllm_surface.__main__ import RECORDS
from vllm_kvpolicy import compat

OUTPUT = "vllm.v1.outputs:AsyncModelRunnerOutput"


@pytest.fixture
def made_record(tmp_path):
    """Return a function that writes a record with some values of 0.33's replaced."""

    def make(version, kind, owner, name, found):
        content = json.loads((RECORDS / "0.33.json").read_text())
        content["vllm"] = version
        assert name in content["found"][kind][owner]
        content["found"][kind][owner][name] = found
        path = tmp_path / "made.json"
        path.write_text(json.dumps(content))
        return str(path)

    return make


@pytest.mark.parametrize("minor", compat.RELEASES)
def test_every_supported_release_is_judged_from_its_record(minor, capsys):
    assert surface.main([str(RECORDS / f"{minor}.json")]) == 0
    *printed, last = capsys.readouterr().out.splitlines()
    assert last.startswith(f"vLLM {minor}.0, which has row") and "0 gone" in last
    changed = {line.split()[-1] for line in printed if line.startswith("changed")}
    assert changed == compat.RELEASES[minor].changed.keys()
    assert sum(line.startswith("same") for line in printed) > 200


def test_the_record_of_the_tested_release_is_that_of_this_vllm():
    version, look = surface.open_release("installed")
    found = surface.record(version, surface.scan(version, look))
    recorded = json.loads(surface.TESTED.read_text())
    assert json.loads(found)["found"] == recorded["found"]


REQUEST = "vllm.v1.request:Request"


@pytest.mark.parametrize(
    ("version", "kind", "owner", "name", "found"),
    [
        ("0.33.0", "abstract", "vllm.v1.outputs", "AsyncModelRunnerOutput", "a b"),
        ("0.33.0", "read", REQUEST, "request_id", None),
        ("0.33.0", "read", REQUEST, "num_tokens", "self"),  # no property any more
        ("0.99.0", "imported", "vllm", "SamplingParams", None),
    ],
)
def test_what_is_not_known_is_shown_and_fails(
    version, kind, owner, name, found, made_record, capsys
):
    assert surface.main([made_record(version, kind, owner, name, found)]) == 1
    *printed, last = capsys.readouterr().out.splitlines()
    state = "changed" if found else "gone"
    assert re.search(rf"^{state} +{kind} ", "\n".join(printed[-3:]), re.MULTILINE)
    assert last.endswith("1 of them not known")
    assert ("has no row" if version == "0.99.0" else "has row") in last


def make_wheel(path: Path, sources: dict[str, str]) -> str:
    with ZipFile(path, "w") as wheel:
        wheel.writestr("vllm-0.33.0.dist-info/METADATA", "")
        for name, source in sources.items():
            wheel.writestr(name, source)
    return str(path)


def test_a_wheel_is_read_without_running_it(tmp_path):
    sources = {
        "vllm/v1/outputs.py": (
            "raise RuntimeError\nclass AsyncModelRunnerOutput:\n"
            "    @abstractmethod\n    def get_output(self): ...\n"
        ),
        "vllm/v1/request/__init__.py": "class Request:\n    request_id: str\n",
    }
    place = make_wheel(tmp_path / "vllm-0.33.0-py3-none-any.whl", sources)
    version, look = surface.open_release(place)
    found = {finding.row.target: finding for finding in surface.scan(version, look)}
    assert version == "0.33.0"
    assert found[f"{OUTPUT}.get_output"].state == "same"
    assert found["vllm.v1.request:Request.request_id"].state == "same"
    assert found["vllm.v1.request:Request.sampling_params"].state == "gone"


def test_what_is_written_is_read_again(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(surface, "RECORDS", tmp_path)
    known = RECORDS / "0.33.json"
    assert surface.main([str(known), "--record"]) == 0
    assert (tmp_path / "0.33.json").read_text() == known.read_text()
    assert "vLLM 0.33.0" in capsys.readouterr().out
