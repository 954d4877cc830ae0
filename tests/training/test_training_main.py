"""The command line `python -m training`: it starts at once and fails in one line."""

import subprocess
import sys
from pathlib import Path

import pytest

from training.__main__ import TRAINERS, main

ROOT = Path(__file__).parents[2]


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT
    )


def test_help_and_wrong_words_load_no_library() -> None:
    for words in (["--help"], ["wgvk"]):
        run = python(
            f"import sys\nfrom training.__main__ import main\ntry:\n    main({words})\n"
            "finally:\n    print('LOADED', {'torch', 'vllm'} & set(sys.modules))"
        )
        assert run.stdout.rpartition("LOADED ")[2].strip() == "set()", run.stderr
        assert run.returncode == (0 if "--help" in words else 2)


@pytest.mark.parametrize("trainer", TRAINERS)
def test_what_is_not_installed_is_named(trainer: str) -> None:
    run = python(
        "import sys; sys.modules['accelerate'] = None; "
        f"from training.__main__ import main; sys.exit(main(['{trainer}']))"
    )
    (told,) = run.stderr.splitlines()
    assert run.returncode == 2
    assert told.endswith("the trainers need accelerate: pip install accelerate")


def test_files_that_are_missing_end_in_a_line(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    missing = str(tmp_path / "none")
    text = ["--text", missing, "--output", str(tmp_path / "out")]
    with pytest.raises(SystemExit):
        main(["qfilter", "--model", missing, *text])
    (*_, told) = capsys.readouterr().err.splitlines()
    assert f"text: cannot read {missing!r}" in told
    assert main(["wgkv", str(tiny_model), *text]) == 2
    (*_, told) = capsys.readouterr().err.splitlines()
    start = f"python -m training wgkv: error: text: cannot read {missing!r}"
    assert told.startswith(start) and "(from " not in told
