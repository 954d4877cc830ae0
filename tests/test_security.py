"""Nothing of ours that reads files reads one in a way that could run what is in it."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
CALLS = {"eval", "exec", "compile", "torch.jit.load", "yaml.load", "yaml.unsafe_load"}
WORDS = {"allow_pickle", "trust_remote_code", "weights_only"}


def unsafe(tree: ast.AST) -> Iterator[str]:
    """Yield what could run code that a file brings along."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            home = getattr(node, "module", None) or ""
            yield from MODULES & {name.partition(".")[0] for name in [*names, home]}
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        given = {word.arg: ast.unparse(word.value) for word in node.keywords}
        if name in CALLS:
            yield name
        if name == "torch.load" and given.get("weights_only") != "True":
            yield "torch.load"
        for word in WORDS & given.keys():
            if given[word] != str(word == "weights_only"):
                yield word


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from pickle import load",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
        "AutoModel.from_pretrained(name, trust_remote_code=flag)",
        "eval(text)",
    ],
)
def test_what_is_unsafe_is_found(code: str) -> None:
    assert list(unsafe(ast.parse(code)))


def test_no_file_of_the_package_reads_unsafely() -> None:
    found = {
        path.relative_to(ROOT).as_posix(): sorted(unsafe(ast.parse(path.read_text())))
        for folder in ("vllm_kvpolicy", "training")
        for path in (ROOT / folder).rglob("*.py")
    }
    assert len(found) > 100
    assert {path: names for path, names in found.items() if names} == {}
