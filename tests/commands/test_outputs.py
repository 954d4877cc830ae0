"""Commands look at where they will write before they begin."""

import argparse
import errno
import tempfile
from importlib import import_module
from pathlib import Path

import pytest

from vllm_kvpolicy.commands.outputs import new_file, new_folder

# What a command writes -> its module and option; an option ends in "/" for a folder.
TRAINING, TRAINERS = ("training.__main__", "--output"), ("wgkv", "dms")
MEASURING = ("qfilter", "triattention", "epikv-collect", "epikv-labels", "epikv-layers")
OUTPUTS = {
    **{f"training {word}": TRAINING for word in MEASURING},
    **{f"training {word}": (TRAINING[0], "--output/") for word in TRAINERS},
    "trace report": ("vllm_kvpolicy.commands.trace", "--json"),
    "trace plot": ("vllm_kvpolicy.commands.trace", "--output/"),
    "accuracy": ("benchmarks.accuracy.__main__", "--out"),
    "language": ("benchmarks.language.__main__", "--out"),
    "merge": ("benchmarks.report.__main__", "--out"),
    "draw": ("benchmarks.report.__main__", "--output/"),
    "serving": ("benchmarks.serving", "--out"),
    "admission": ("benchmarks.admission", "--out"),
    "ask": ("benchmarks.peer.__main__", "--record"),
    "evaluate": ("reasoner.evaluate", "--json"),
    "train": ("reasoner.train", "--run/"),
}
HAVE_SUBCOMMANDS = ("merge", "draw", "ask")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "file"
    file.write_text("as it was")
    return file


@pytest.mark.parametrize("name", OUTPUTS)
def test_a_command_refuses_what_it_could_not_write(name, tmp_path, file, capsys):
    module, given = OUTPUTS[name]
    option = given.rstrip("/")
    words = name.split()[1:] or [name] * (name in HAVE_SUBCOMMANDS)
    wrong = {file / "f": "is not a folder", file / "no" / "f": "is not a folder"}
    if given == option:
        wrong[tmp_path] = "which is a folder"
    else:
        wrong[file] = "is not a folder"
    for path, told in wrong.items():
        with pytest.raises(SystemExit) as stopped:
            import_module(module).main([*words, option, str(path)])
        assert stopped.value.code == 2
        line = capsys.readouterr().err.splitlines()[-1]
        assert f": error: argument {option}: got {str(path)!r}" in line and told in line


def test_what_can_be_written_stays_as_it_is(tmp_path, file):
    assert new_file(str(file)) == file and file.read_text() == "as it was"
    assert new_file(str(tmp_path / "new")) == tmp_path / "new"
    assert new_file(str(tmp_path / "c" / "d" / "f")) == tmp_path / "c" / "d" / "f"
    assert new_folder(str(tmp_path / "a" / "b")) == tmp_path / "a" / "b"
    assert new_folder(str(tmp_path)) == tmp_path
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["c", "d", "file"]
    assert new_file("/dev/null") == Path("/dev/null")


def test_what_the_system_refuses_is_said(tmp_path, monkeypatch):
    """A test may run as root, whom permissions do not stop."""

    def full(dir: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    for check in (new_file, new_folder):
        with pytest.raises(argparse.ArgumentTypeError) as caught:
            check(str(tmp_path / "new"))
        assert str(caught.value).endswith("cannot write there: No space left on device")


def test_a_name_that_no_file_can_have_is_refused():
    for check in (new_file, new_folder):
        with pytest.raises(argparse.ArgumentTypeError, match="File name too long"):
            check("x" * 5000)
