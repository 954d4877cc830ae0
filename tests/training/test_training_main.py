"""The command line `python -m training`: it starts at once and fails in one line."""

import subprocess
import sys
from pathlib import Path

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


def test_what_is_not_installed_is_named() -> None:
    run = python(
        "import sys; sys.modules['accelerate'] = None; "
        "from training.__main__ import main; sys.exit(main(['wgkv']))"
    )
    (told,) = run.stderr.splitlines()
    assert run.returncode == 2
    assert told.endswith("the trainers need accelerate: pip install accelerate")
