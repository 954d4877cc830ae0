"""The Dockerfiles against the project: what they copy, run, install and serve.

Nothing is built: there may be no daemon. What a step names has to exist, in the git
tree and in the build context.
"""

import json
import re
import shlex
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from posixpath import normpath
from threading import Thread

import pytest

from vllm_kvpolicy import compat

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "docker")]
import install_cpu  # noqa: E402
import setup_env  # noqa: E402

import serve  # noqa: E402

IMAGES = ("cpu", "cuda")


def steps(image: str) -> list[tuple[str, str]]:
    """Return the instructions of a Dockerfile, each on one line, without comments."""
    text = (ROOT / "docker" / f"Dockerfile.{image}").read_text()
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    whole = "\n".join(lines).replace("\\\n", " ")
    split = [line.split(maxsplit=1) for line in whole.splitlines() if line.strip()]
    return [(word, " ".join(rest.split())) for word, rest in split]


def values(image: str, word: str) -> list[str]:
    return [rest for name, rest in steps(image) if name == word]


def argument(image: str, name: str) -> str:
    (found,) = [v for v in values(image, "ARG") if v.startswith(f"{name}=")]
    return found.partition("=")[2]


def copied(image: str) -> list[tuple[str, str]]:
    """Return what is copied from the checkout, each source with its destination."""
    pairs = []
    for rest in values(image, "COPY"):
        if not rest.startswith("--from="):
            *sources, target = rest.split()
            pairs += [(source, target) for source in sources]
    return pairs


def tracked() -> list[str]:
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    answer = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True)
    names = answer.stdout.decode().split("\0")
    return [name for name in names if name and (ROOT / name).exists()]


def is_ignored(path: str, rules: list[str]) -> bool:
    """Apply the rules of a .dockerignore: the last that matches the path counts."""
    parts = path.split("/")
    parents = ["/".join(parts[: n + 1]) for n in range(len(parts))]
    ignored = False
    for rule in rules:
        pattern = re.escape(rule.removeprefix("!").strip("/"))
        pattern = pattern.replace(r"\*\*/", "(.*/)?").replace(r"\*", "[^/]*")
        if any(re.fullmatch(pattern, parent) for parent in parents):
            ignored = not rule.startswith("!")
    return ignored


def ignore_rules() -> list[str]:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


@pytest.mark.parametrize("image", IMAGES)
def test_everything_copied_is_in_the_tree_and_in_the_context(image: str) -> None:
    rules, names = ignore_rules(), tracked()
    assert copied(image)
    for source, _ in copied(image):
        below = [n for n in names if n == source or n.startswith(f"{source}/")]
        assert below, f"COPY {source}: not in the git tree"
        lost = [name for name in below if is_ignored(name, rules)]
        assert not lost, f"COPY {source}: .dockerignore leaves out {lost}"


def test_the_context_holds_nothing_else() -> None:
    wanted = {source for image in IMAGES for source, _ in copied(image)}
    kept = {rule[1:] for rule in ignore_rules() if rule.startswith("!")}
    assert kept == wanted
    for name in (".git/config", ".venv/bin/python", "runs/a.json", "tests/conftest.py"):
        assert is_ignored(name, ignore_rules())
    assert is_ignored("vllm_kvpolicy/__pycache__/a.pyc", ignore_rules())
    assert is_ignored("vllm_kvpolicy/_C.abi3.so", ignore_rules())


@pytest.mark.parametrize("image", IMAGES)
def test_steps_name_files_that_were_copied_before(image: str) -> None:
    there: set[str] = set()
    named = 0
    for word, rest in steps(image):
        if word == "COPY" and not rest.startswith("--from="):
            *sources, target = rest.split()
            is_folder = target.endswith("/")
            places = [target + Path(s).name if is_folder else target for s in sources]
            there.update(map(normpath, places))
        elif word == "RUN":
            there.update(re.findall(r"> (\S+)", rest))
            files = re.findall(r"(?<![\w/.-])[\w/]+\.(?:txt|py)\b", rest)
            missing = set(files) - there
            assert not missing, f"RUN {rest}: {missing} were not copied"
            named += len(files)
    assert named


@pytest.mark.parametrize("image", IMAGES)
def test_the_package_is_built_from_all_that_its_build_reads(image: str) -> None:
    """What setup.py, pyproject.toml and MANIFEST.in name, and the licence."""
    sources = {source for source, _ in copied(image)}
    assert {"setup.py", "pyproject.toml", "MANIFEST.in", "README.md"} <= sources
    assert {"LICENSE", "NOTICE", "vllm_kvpolicy", "reasoner/checkpoint"} <= sources
    assert "csrc" in sources
    builds = [rest for rest in values(image, "RUN") if "KVPOLICY_CUDA=" in rest]
    assert len(builds) == 1
    assert f"KVPOLICY_CUDA={int(image == 'cuda')}" in builds[0]
    assert f"KVPOLICY_CPU={int(image == 'cpu')}" in builds[0]


def test_versions_are_the_projects() -> None:
    version = argument("cuda", "VLLM_VERSION")
    assert compat.supports(version) and version == setup_env.VLLM_VERSION
    bases = {rest.partition(" AS ")[0] for rest in values("cuda", "FROM")}
    assert bases == {"vllm/vllm-openai:v${VLLM_VERSION}"}
    assert values("cpu", "FROM") == ["python:${PYTHON_VERSION}-slim"]
    assert f"python{argument('cpu', 'PYTHON_VERSION')}" == setup_env.PYTHON_NAMES[0]
    page = (ROOT / "docker" / "README.md").read_text()
    assert f"`python:{argument('cpu', 'PYTHON_VERSION')}-slim`" in page
    assert f"`vllm/vllm-openai:v{version}`" in page


def test_the_cuda_image_has_the_whole_pinned_compiler() -> None:
    (step,) = [rest for rest in values("cuda", "RUN") if "grep" in rest]
    (pattern,) = re.findall(r"grep '(\S+)' requirements/dev.txt", step)
    lines = (ROOT / "requirements" / "dev.txt").read_text().splitlines()
    found = {line.partition("==")[0] for line in lines if re.match(pattern, line)}
    assert {"nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-cuda-cccl"} < found
    assert {"nvidia-cuda-runtime", "nvidia-nvvm"} < found


# -- what they serve -------------------------------------------------------------------


def served(image: str) -> list[str]:
    (words,) = values(image, "CMD")
    return json.loads(words)


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_serves_what_make_serve_does(image: str) -> None:
    assert [json.loads(words) for words in values(image, "ENTRYPOINT")] == [
        ["vllm", "serve"]
    ]
    options = serve.parse(["--host", "0.0.0.0"])
    _, _, *words = serve.build_command(options, image)
    assert served(image) == words
    assert (served(image)[0], served(image)[0]) in copied(image)
    assert values(image, "EXPOSE") == [str(options.port)]


def documented() -> list[list[str]]:
    """Return what follows the images' names in the commands of the page."""
    page = (ROOT / "docker" / "README.md").read_text()
    lines = [line for line in page.splitlines() if line.startswith("    docker run")]
    commands = [re.split(r"vllm-kvpolicy:\w+", line)[1] for line in lines]
    return [shlex.split(words) for words in commands if words.strip()]


def test_vllm_takes_these_flags() -> None:
    from vllm.entrypoints.cli.serve import make_arg_parser
    from vllm.plugins import load_general_plugins
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    load_general_plugins()
    commands = [*map(served, IMAGES), *documented()]
    assert len(commands) == 3
    for words in commands:
        parser = make_arg_parser(FlexibleArgumentParser(exit_on_error=False))
        args, unknown = parser.parse_known_args(words)
        assert not unknown
        assert args.model_tag == words[0]
        assert args.kv_policy in ("ams-expected", "snapkv")


class Healthy(BaseHTTPRequestHandler):
    """Answers /health as vLLM does."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        """Stay quiet."""


@pytest.mark.parametrize("image", IMAGES)
def test_the_health_check_sees_a_server_come_and_go(image: str) -> None:
    (check,) = values(image, "HEALTHCHECK")
    program, flag, code = json.loads(check.partition("CMD ")[2])
    assert (program.rstrip("3"), flag) == ("python", "-c")
    assert code.count(":8000/") == 1
    with HTTPServer(("127.0.0.1", 0), Healthy) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        command = [sys.executable, "-c"]
        command.append(code.replace(":8000/", f":{server.server_port}/"))
        assert subprocess.run(command).returncode == 0
        server.shutdown()
    answer = subprocess.run(command, capture_output=True, text=True)
    assert answer.returncode == 1 and "refused" in answer.stderr


def test_the_cpu_image_is_not_run_by_root() -> None:
    words = [word for word, _ in steps("cpu")]
    (user,) = values("cpu", "USER")
    assert user.isdigit() and int(user) > 0
    assert any(f"useradd --create-home --uid {user}" in r for r in values("cpu", "RUN"))
    assert "RUN" not in words[words.index("USER") :]


# -- docker/install_cpu.py -------------------------------------------------------------


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every step of the script recorded instead of done."""
    done: list[str] = []
    venv = tmp_path / ".venv"
    (venv / "lib" / "python3.11" / "site-packages").mkdir(parents=True)
    monkeypatch.setattr(setup_env, "VENV", venv)
    monkeypatch.setattr(setup_env, "LOG", venv / "setup.log")
    monkeypatch.setattr(setup_env, "make_venv", lambda python: done.append("venv"))
    monkeypatch.setattr(setup_env, "name_vllm", lambda path: done.append(path.name))
    monkeypatch.setattr(
        setup_env, "pip_install", lambda *words, failure: done.append(words[-1])
    )
    return done


def test_the_cpu_image_installs_what_set_up_does(installed: list[str]) -> None:
    assert install_cpu.main() == 0
    pin = "torch==2.13.0+cpu"
    assert installed == ["venv", pin, "requirements/cpu.txt", "site-packages"]
