"""Installs the pinned packages of the CPU image into `.venv`.

The steps of scripts/setup_env.py, without what only tests and linters need and without
this project, which follows in a layer of its own.
Called by docker/Dockerfile.cpu. Standard library only.
Process: any
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "scripts"))
import setup_env  # noqa: E402


def main() -> int:
    """Make `.venv` and fill it; 0 on success."""
    try:
        setup_env.make_venv(sys.executable)
        setup_env.LOG.write_text("")
        setup_env.install_cpu_torch()
        lock = "requirements/cpu.txt"
        setup_env.pip_install("-r", lock, failure=f"pip could not install {lock}.")
    except setup_env.SetupError as error:
        # The log does not outlive a build that failed.
        if setup_env.LOG.exists():
            print(setup_env.LOG.read_text(), file=sys.stderr)
        print(f"set-up failed: {error}", file=sys.stderr)
        return 1
    setup_env.name_vllm(next((setup_env.VENV / "lib").glob("python3*/site-packages")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
