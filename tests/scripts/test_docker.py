"""The Dockerfiles against the project: what they copy, run, install and serve.

Nothing is built: there may be no daemon. What a step names has to exist, in the git
tree and in the build context.
"""

import json
import re
import shlex
import sys
from pathlib import Path
from posixpath import normpath

import pytest

from support.checkout import ROOT, tracked
from support.vllm_flags import serve_flags
from vllm_kvpolicy import compat

sys.path.insert(0, str(ROOT / "scripts"))
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
    rules = ignore_rules()
    names = [path.relative_to(ROOT).as_posix() for path in tracked()]
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


# -- what they serve -------------------------------------------------------------------


def served(image: str) -> list[str]:
    (words,) = values(image, "CMD")
    return json.loads(words)


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_serves_what_make_serve_does(image: str) -> None:
    (entry,) = values(image, "ENTRYPOINT")
    assert json.loads(entry) == ["vllm", "serve"]
    options = serve.parse(["--host", "0.0.0.0"])
    serve.choose_budget(options)
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
    commands = [*map(served, IMAGES), *documented()]
    assert len(commands) == 3
    for words in commands:
        assert serve_flags(words).kv_policy in ("ams-expected", "snapkv")
