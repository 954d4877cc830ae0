"""The list of seeded faults fits the files; its command tells what a suite finds."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tools.seeded_faults.faults import Fault, read_faults

ROOT = Path(__file__).parents[2]
LIST = """
[[fault]]
name = "thirds"
file = "half.py"
old = "n // 2"
new = "n // 3"
tests = ["test_half.py -k odd", "test_half.py"]
[[fault]]
name = "halves-rounded-up"
file = "half.py"
old = "n // 2"
new = "-(-n // 2)"
tests = ["test_half.py -k even"]
"""


def test_every_fault_fits_its_file_and_names_tests_that_are_there():
    faults = read_faults()
    assert len({fault.name for fault in faults}) == len(faults) >= 80
    for fault in faults:
        text = fault.put_into((ROOT / fault.file).read_text())
        if fault.file.endswith(".py"):
            ast.parse(text)
        assert fault.tests
        for words in fault.tests:
            assert (ROOT / words.split()[0]).is_file(), fault.name
            assert "[" not in words, f"{fault.name}: sweeps change, name functions"


@pytest.mark.parametrize("text", ["return n", "n // 2 + n // 2"])
def test_a_fault_whose_text_is_not_there_once_is_an_error(text):
    fault = Fault("thirds", "half.py", "n // 2", "n // 3", ("test_half.py",))
    with pytest.raises(ValueError, match=r"thirds: 'n // 2' is [02] times in half.py"):
        fault.put_into(text)


def test_a_suite_is_judged(tmp_path):
    """Of two faults its tests find one; a second run asks for nothing again."""
    checkout, output = tmp_path / "checkout", tmp_path / "out.jsonl"
    checkout.mkdir()
    half = checkout / "half.py"
    half.write_text("def half(n):\n    return n // 2\n")
    test = "from half import half\n\n\ndef test_even():\n    assert half(4) == 2\n"
    (checkout / "test_half.py").write_text(test)
    (tmp_path / "list.toml").write_text(LIST)
    for words in (["init", "--quiet"], ["add", "."]):
        subprocess.run(["git", *words], cwd=checkout, check=True)

    def judge(*words):
        command = [sys.executable, "-m", "tools.seeded_faults", *words]
        command += ["--checkout", checkout, "--list", tmp_path / "list.toml"]
        command += ["--output", output]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)

    done = judge()
    assert done.returncode == 1, done.stderr
    assert "1 of 2 found" in done.stdout and "without a fault" not in done.stdout
    verdicts = [json.loads(line) for line in output.read_text().splitlines()]
    assert [(each["result"], each["test"]) for each in verdicts][0] == (
        "found",
        "test_half.py::test_even",
    )
    assert verdicts[1]["result"] == "MISSED" and "1 passed" in verdicts[1]["test"]
    unknown = judge("quarters")
    assert unknown.returncode == 2 and "'quarters'" in unknown.stderr
    again = judge("thirds", "--against", output)
    assert again.returncode == 0 and "1 of 1 found" in again.stdout
    assert len(output.read_text().splitlines()) == 2
    assert half.read_text().endswith("n // 2\n")
