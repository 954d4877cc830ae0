"""The package keeps its shape, and every rule that says so can fail."""

import re
from pathlib import Path

import pytest

import architecture_rules as rules
from support.checkout import ROOT, tracked
from support.collection import DEAREST, rank

MAX_CHECKOUT_BYTES = 28 * 1024**2  # 3 MB of them gates of SmolLM2
# A rule, the modules that break it, and what is in the first of them.
VIOLATIONS = [
    (rules.every_module_has_a_room, ["novelty"], ""),
    (rules.every_module_has_a_room, [f"kernels.a{n}" for n in range(31)], ""),
    (rules.every_module_has_a_room, [f"a{n}" for n in range(13)], ""),
    (rules.imports_run_down, ["kernels.a", "policies.base"], "import {1}"),
    (rules.imports_run_down, ["worker.a", "block_manager.b"], "import {1}"),
    (rules.imports_run_down, ["api.a", "commands.outputs"], "import {1}"),
    (rules.the_package_stands_alone, ["verify.a"], "from reasoner import problems"),
    (rules.the_package_stands_alone, ["a"], "def f():\n    import benchmarks.stats"),
    (rules.leaves_use_the_standard_library, ["config"], "def f():\n    import torch"),
    (rules.leaves_use_the_standard_library, ["policies.__init__"], "import torch"),
    (rules.leaves_use_the_standard_library, ["config"], "import pydantic"),
    (
        rules.methods_are_named_by_their_files,
        ["api.patch", "policies.admissions.dms.model"],
        "from vllm_kvpolicy.policies.admissions.dms import model",
    ),
    (rules.methods_are_named_by_their_files, ["config"], "A = 'wgkv+tova'"),
    (rules.no_import_cycles, ["kernels.a"], "from vllm_kvpolicy.kernels import a"),
    (
        rules.imports_stand_at_the_top,
        ["worker.worker", "compat"],
        "def f():\n    from vllm_kvpolicy import compat",
    ),
    (
        rules.files_and_functions_are_small,
        ["config"],
        "def f():\n" + "    x = 1\n" * 60,
    ),
    (rules.files_and_functions_are_small, ["config"], "x = 1\n" * 601),
    (rules.no_environment_variables, ["config"], "import os\nX = os.environ['X']"),
    (rules.no_environment_variables, ["api.guards"], "from vllm import envs"),
    (rules.only_compat_reads_versions, ["worker.a"], "X = vllm.__version__"),
    (
        rules.only_patch_assigns_onto_vllm,
        ["worker.worker"],
        "import vllm.a as b\nc = b.Worker\nc.run = print",
    ),
    (
        rules.only_patch_assigns_onto_vllm,
        ["api.cli"],
        "from vllm import LLM\nsetattr(LLM, 'chat', None)",
    ),
    (rules.hot_modules_do_not_sync, ["kernels.a"], "x = y.item()"),
    (rules.hot_modules_fill_by_index, ["worker.a"], "x[slots] = 0"),
    (rules.hot_modules_fill_by_index, ["kernels.a"], "x[:, rows[0], 1] = -NEVER"),
]
BAD_TESTS = {
    "asserts nothing": "def test_a():\n    print(1)",
    "returns early": "def test_a():\n    if x:\n        return\n    assert x",
}
IMPORT = re.compile(r"^\s*(?:from|import) ([\w.]+)", re.MULTILINE)
NO_TESTS = ("architecture_rules.py", "conftest.py")
# Absolute paths of a machine, written so that this file does not match itself.
MACHINE_PATH = re.compile(r"(?<![\w.}])/(?:home|root|work|Users|mnt)/\w")


def package_sources():
    folder = ROOT / rules.PACKAGE
    return {
        ".".join(path.relative_to(folder).with_suffix("").parts): path.read_text()
        for path in sorted(folder.rglob("*.py"))
    }


@pytest.mark.parametrize("rule", rules.PACKAGE_RULES, ids=lambda rule: rule.__name__)
def test_the_package_keeps(rule):
    assert rule(package_sources()) == []


def test_every_rule_has_a_violation():
    assert {rule for rule, *_ in VIOLATIONS} == set(rules.PACKAGE_RULES)


@pytest.mark.parametrize(("rule", "modules", "source"), VIOLATIONS)
def test_a_violation_is_found(rule, modules, source):
    paths = [f"vllm_kvpolicy.{module}" for module in modules]
    sources = dict.fromkeys(modules, "") | {modules[0]: source.format(*paths)}
    assert rule(sources) != []


def test_a_cycle_of_two_is_found():
    first = "import vllm_kvpolicy.kernels.b"
    second = "from vllm_kvpolicy.kernels import a"
    assert rules.no_import_cycles({"kernels.a": first, "kernels.b": second})


def test_every_test_can_fail():
    folder = ROOT / "tests"
    sources = {
        str(path.relative_to(folder)): path.read_text()
        for path in folder.rglob("test_*.py")
    }
    assert rules.tests_can_fail(sources) == []


@pytest.mark.parametrize("message", BAD_TESTS)
def test_a_test_that_cannot_fail_is_found(message):
    (found,) = rules.tests_can_fail({"test_x": BAD_TESTS[message]})
    assert message in found


def test_the_dearest_files_come_first():
    tests = ROOT / "tests"
    missing = [name for name in DEAREST if not (tests / name).is_file()]
    assert not missing and len(set(DEAREST)) == len(DEAREST)
    first, other = tests / DEAREST[0], tests / "test_architecture.py"
    assert rank(first) == 0 < rank(tests / DEAREST[1]) < rank(other)
    assert rank(other) == rank(Path("elsewhere/test_a.py"))


def test_folders_of_tests_are_rooms():
    """Those of the package, and those that are named here because they are no room."""
    others = ["benchmarks", "csrc", "engine", "golden", "gpu", "interpreted"]
    others += ["reasoner", "scripts", "serve", "support", "tools", "training"]
    others += ["v2_runner"]
    rooms = [path.name for path in (ROOT / rules.PACKAGE).iterdir() if path.is_dir()]
    folders = [path.name for path in (ROOT / "tests").iterdir() if path.is_dir()]
    unknown = {name for name in folders if not name.startswith(("_", "."))}
    assert unknown - {*rooms, *others} == set()


def test_what_is_no_test_is_in_support():
    folder = ROOT / "tests"
    found = [
        str(path.relative_to(folder))
        for path in folder.rglob("*.py")
        if not path.name.startswith("test_") and path.name not in NO_TESTS
        if path.relative_to(folder).parts[0] != "support"
    ]
    assert found == []


def test_test_files_import_no_test_file():
    """What two of them need is in tests/support."""
    folder = ROOT / "tests"
    tests = {path.stem for path in folder.rglob("test_*.py")}
    found = [
        f"{path.relative_to(folder)}: imports {name}"
        for path in folder.rglob("*.py")
        for name in IMPORT.findall(path.read_text())
        if name.rpartition(".")[2] in tests
    ]
    assert found == []


def test_files_name_no_path_of_a_machine():
    found = []
    for path in tracked():
        try:
            lines = path.read_text().splitlines()
        except UnicodeDecodeError:
            continue
        found += [
            f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}"
            for number, line in enumerate(lines, 1)
            if MACHINE_PATH.search(line)
        ]
    assert found == []


def test_machine_paths_are_recognised():
    assert MACHINE_PATH.search("see " + "/ho" + "me/me/x")
    assert not MACHINE_PATH.search("${ROOT}" + "/work" + "/x")


def test_the_checkout_is_small():
    assert sum(path.stat().st_size for path in tracked()) < MAX_CHECKOUT_BYTES
