"""docs/add_a_policy.md: its examples run as they stand there, and its rules hold."""

import re
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch

from support.event_inputs import make_inputs
from vllm_kvpolicy.api.engine_config import check_files
from vllm_kvpolicy.config import KVPolicyConfig
from vllm_kvpolicy.policies import compose as factory
from vllm_kvpolicy.policies import names as registry
from vllm_kvpolicy.policies import score
from vllm_kvpolicy.policies import scorers as scorers_folder
from vllm_kvpolicy.policies.fingerprint import fingerprint

PAGE = Path(__file__).parents[2] / "docs" / "add_a_policy.md"
SCORER, TEST = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
POINT = re.findall(r'```toml\n\[.*\."(.*)"\]\n(\w+) = "(.*)"', PAGE.read_text())[0]
OWN = "mypolicies:ValueNorm"
MORE = """
from vllm_kvpolicy.policies.allocators._uniform import UniformTopK
from vllm_kvpolicy.policies.allocators.adakv import AdaKVAllocator
from vllm_kvpolicy.policies.base import Needs
from mypolicies import ValueNorm
from vllm_kvpolicy.policies.options import BaseOptions, WindowOptions
from vllm_kvpolicy.policies.scorers.knorm import KnormScorer
from vllm_kvpolicy.policies.scorers.streaming import StreamingScorer
from vllm_kvpolicy.policies.words import BaseAllocator, BaseScorer

class Uniform(UniformTopK):
    summary, ragged = "as without an allocator", True

class Silent(KnormScorer):
    summary, needs = "reads queries and does not say so", Needs(window_tokens=3)

class Masking(KnormScorer):
    summary = "its option is one of all policies"
    class Options(BaseOptions):
        exact: bool = True

class Plain(KnormScorer):
    summary, Options = "has options of another kind", dict

class Windowed(KnormScorer):
    summary, query_window = "reads as many queries as an option says", "nope"

class Listed(KnormScorer):
    summary, refuses = "lists words without reasons", ["tova"]

class Moded(KnormScorer):
    summary = "has an option that is a text and no path"
    class Options(BaseOptions):
        mode: str = "api"
    def __init__(self, mode): pass

class Fresh(BaseAllocator):
    summary = "extends no allocator of the package"
    def choose(self, *args): pass

class Shared(AdaKVAllocator):
    summary = "shares as `adakv` does"

class Newest(StreamingScorer):
    summary = "scores as `streaming` does"

class Gated(KnormScorer):
    summary, needs = "remembers gates", Needs(keys=True, memory=("admission",))

class Masked(KnormScorer):
    summary, needs = "decides while tokens are computed", Needs(keys=True, until=True)

class Undeclared(ValueNorm):
    summary, needs = "reads values and does not say so", Needs()

class Blind(KnormScorer):
    summary, needs = "reads attention of no queries", Needs(keys=True, usage=True)

class Quick(KnormScorer):
    summary = "has an option of `ams` with another default"
    class Options(BaseOptions):
        min_segment: int = 3

class Alike(KnormScorer):
    summary, query_window = "shares the window of `ams`", "window"
    Options = WindowOptions

class Flat(KnormScorer):
    summary = "returns a score per head"
    def score(self, inputs, usage): return super().score(inputs, usage).amax(-1)

class Whole(KnormScorer):
    summary = "returns integers"
    def score(self, inputs, usage): return super().score(inputs, usage).long()

class Misnamed(KnormScorer):
    summary, needs = "remembers other names", Needs(keys=True, memory=("old",))
    def remember(self, score): return {"new": score}

class Forgetful(KnormScorer):
    summary, needs = "declares what it never returns", Needs(keys=True, memory=("old",))

class Unfinished(BaseScorer):
    summary = "has no method score"

Neither = 3
"""


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The page's module and another one, where Python finds them."""
    (tmp_path / "mypolicies.py").write_text(SCORER)
    (tmp_path / "more_policies.py").write_text(MORE)
    (tmp_path / "broken_policies.py").write_text("len(5)")
    monkeypatch.syspath_prepend(tmp_path)
    forget()
    yield tmp_path
    forget()


def forget() -> None:
    for name in ("mypolicies", "more_policies", f"{scorers_folder.__name__}.vnorm"):
        sys.modules.pop(name, None)
    registry._own.cache_clear()
    registry.installed.cache_clear()
    vars(registry.SCORERS).pop("_files", None)


@pytest.fixture
def install(example: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return what makes packages have entry points of these names and values."""

    def install(**values: str) -> None:
        points = [EntryPoint(*item, registry.GROUP) for item in values.items()]
        monkeypatch.setattr(registry, "entry_points", lambda group: points)
        registry.installed.cache_clear()

    return install


@pytest.mark.parametrize("allocator", ["", "ams-", "adakv-", "more_policies:Uniform-"])
def test_a_module_and_its_class_stand_for_a_word(example: Path, allocator: str) -> None:
    name = f"{allocator}{OWN}+quest"
    info = registry.parse(name)
    assert info.name == name and info.scorer is sys.modules["mypolicies"].ValueNorm
    policy = factory.build(f"{allocator}{OWN}", {"vnorm_power": 2})
    inputs = make_inputs(policy.needs)
    keep = policy.decide(inputs, budget=90).keep
    assert (keep | ~inputs.must_keep).all() and not keep.all()
    config = KVPolicyConfig(f"{allocator}{OWN}", 128, 64)
    assert config.is_ragged == (allocator not in ("", "ams-"))
    with pytest.raises(ValueError, match="vnorm_power: got -1, expected a number >= 0"):
        KVPolicyConfig(OWN, options={"vnorm_power": -1})


def test_a_package_gives_it_a_name(install: Callable[..., None]) -> None:
    group, word, value = POINT
    assert group == registry.GROUP and value == OWN
    install(**{word: value, "mine": "more_policies:Uniform"})
    assert registry.parse(word).scorer is registry.parse(f"mine-{OWN}").scorer
    assert registry.parse("ams-vnorm").summary.startswith("longest values; ")
    assert "Class for a scorer or an allocator, vnorm, mine; " in registry.grammar()
    assert word not in registry.SCORERS  # tests and pages have this package's alone


@pytest.mark.parametrize("word", ["tova", "ams", "wgkv", "quest", "identity", "none"])
def test_a_name_that_is_taken_is_an_error(
    install: Callable[..., None], word: str
) -> None:
    install(**{word: OWN})
    with pytest.raises(ValueError, match=f"entry point '{word}' = .* has this name"):
        registry.parse("snapkv")
    assert "snapkv" in registry.grammar(
        in_full=False
    )  # stock vLLM has this in its help


def test_two_packages_cannot_share_a_name(
    example: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = [EntryPoint("vnorm", value, registry.GROUP) for value in (OWN, "b:C")]
    monkeypatch.setattr(registry, "entry_points", lambda group: points)
    with pytest.raises(ValueError, match="another policy has this name; rename it"):
        registry.installed()
    for name, value, text in (
        ("v-norm", OWN, "expected a name of letters, digits and _"),
        ("v", "my-module:A", "expected package.module:Class"),
        ("v", "module", "expected package.module:Class"),
    ):
        points[1:] = [EntryPoint(name, value, registry.GROUP)]
        with pytest.raises(ValueError, match=text):
            registry.installed()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "nowhere.at_all:Scorer",
            "raises ModuleNotFoundError (\"No module named 'nowhere'\"), expected",
        ),
        ("mypolicies:Absent", "which its module does not have, expected a subclass of"),
        (":ValueNorm", "expected [ADMISSION+][ALLOCATOR-]SCORER"),
        ("more_policies:Neither", "3, expected a subclass of vllm_kvpolicy.policies."),
        ("more_policies:Uniform", "policies.words.BaseScorer"),
        (f"{OWN}-tova", "policies.words.BaseAllocator"),
        ("more_policies:Unfinished", "which does not define score, expected"),
        (f"-{OWN}", "expected [ADMISSION+][ALLOCATOR-]SCORER"),
        (
            "broken_policies:A",
            "raises TypeError (\"object of type 'int' has no len()\")",
        ),
        ("more_policies:Masking", "expected another name for its option exact, which"),
        ("more_policies:Plain", "expected Options to be a BaseOptions of"),
        ("more_policies:Windowed", "got query_window 'nope', expected a number or one"),
        ("more_policies:Listed", "expected refuses to be a mapping"),
        ("local+more_policies:Uniform-snapkv", "nothing is left to choose"),
        ("local+more_policies:Fresh-snapkv", "nothing is left to choose"),
        ("wgkv+more_policies:Shared-snapkv", "refused because the allocator sizes"),
        ("adakv-more_policies:Newest", "refused because"),
        ("ams-more_policies:Quick", "different options min_segment, expected another"),
    ],
)
def test_what_cannot_be_a_word_is_said_in_one_line(
    example: Path, name: str, text: str
) -> None:
    with pytest.raises(ValueError) as error:
        registry.parse(name)
    said = str(error.value)
    assert said.startswith("kv_policy: got ") and text in said and "\n" not in said


def test_what_a_scorer_reads_is_declared(example: Path, policy_config: Any) -> None:
    """And checked before weights load."""
    for name, text in {
        "Silent": "no class of its words .* by query_window; ",
        "Gated": "remember admission, expected names of their own, not admission or",
        "Masked": "expected `until` and `exact` of admissions only",
        "Blind": "expected a `query_window` of those who read the usage",
    }.items():
        with pytest.raises(ValueError, match=text):
            factory.build(f"more_policies:{name}")
    config = KVPolicyConfig("tova", 128, 64, allow=("more_policies:Silent",))
    with pytest.raises(ValueError, match="no class of its words .* by query_window; "):
        check_files(config, policy_config)


def test_words_may_share_an_option_that_means_the_same(example: Path) -> None:
    found = factory.build("ams-more_policies:Alike", {"window": 48})
    assert found.scorer.needs.window_tokens == found.allocator.needs.window_tokens == 48


def test_what_is_not_declared_is_not_there_without_an_engine_either(
    example: Path,
) -> None:
    tensors = torch.randn(2, 9, 4), torch.randn(2, 9, 4), torch.randn(2, 1, 4)
    with pytest.raises(ValueError, match="values: got None, but this policy needs it"):
        score("more_policies:Undeclared", *tensors, torch.arange(9), 1e4)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("Flat", r"score: got \[3, 2, 2\] of torch.float32, expected \[E, L, H, T\], "),
        ("Whole", "of torch.int64, expected .* of floating point"),
        ("Misnamed", "memory: got new, expected old, as `needs.memory` declares"),
        ("Forgetful", "memory: got nothing, expected old"),
    ],
)
def test_what_a_scorer_returns_is_checked_at_an_event(
    example: Path, name: str, text: str
) -> None:
    policy = factory.build(f"more_policies:{name}")
    with pytest.raises(ValueError, match=text):
        policy.decide(make_inputs(policy.needs), budget=90)


def test_requests_choose_names_and_never_code(example: Path) -> None:
    """Nothing is imported for a name that the server does not list."""
    server = KVPolicyConfig("tova", 128, 64, allow=("snapkv",))
    listing = KVPolicyConfig("tova", 128, 64, allow=(f"ams-{OWN}",))
    for config in (server, listing):
        for name in (OWN, "more_policies:Uniform-tova", f"ams-{OWN}+quest", "os:path"):
            with pytest.raises(
                ValueError, match="one that the server allows: 'tova', "
            ):
                config.with_request({"kv_policy": name})
    assert "more_policies" not in sys.modules
    asked = listing.with_request({"kv_policy": f"ams-{OWN}"})
    assert asked is not None and asked.resolved() is listing.resolved(f"ams-{OWN}")
    with pytest.raises(ValueError, match="the server's own key 'kv_allow'"):
        listing.with_request({"kv_allow": [OWN]})


def test_processes_compare_the_code_of_own_words(example: Path) -> None:
    first = fingerprint(KVPolicyConfig(OWN))
    assert first == fingerprint(KVPolicyConfig(OWN))
    (example / "mypolicies.py").write_text(f"{SCORER}\n# changed\n")
    assert first != fingerprint(KVPolicyConfig(OWN))
    (example / "mypolicies.py").unlink()  # as of what is typed in, or in an archive
    assert first != fingerprint(KVPolicyConfig(OWN))


def test_a_file_of_the_folder_is_a_word(
    example: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = example / "folder"
    folder.mkdir()
    (folder / "vnorm.py").write_text(SCORER)
    (folder / "_helper.py").write_text("")
    paths = [*scorers_folder.__path__, str(folder)]
    monkeypatch.setattr(scorers_folder, "__path__", paths)
    forget()
    assert {"vnorm", "ams-vnorm", "adakv-vnorm"} <= set(registry.names())
    assert "vnorm" in registry.grammar() and "_helper" not in registry.SCORERS
    assert factory.build("vnorm").needs.values


def test_the_test_of_the_page_passes_and_can_fail(example: Path) -> None:
    names: dict[str, Any] = {}
    exec(TEST, names)
    names["test_scores_are_the_squared_lengths_of_values"]()
    names["score"] = lambda *args, **options: torch.zeros(2, 50)
    with pytest.raises(AssertionError, match="not close"):
        names["test_scores_are_the_squared_lengths_of_values"]()


@pytest.mark.parametrize(
    ("name", "options"),
    [("more_policies:Moded", {"mode": "api"}), ("dms", {"dms_adapter": None})],
)
def test_values_that_are_no_paths_are_compared_alike_everywhere(
    example: Path, monkeypatch: pytest.MonkeyPatch, name: str, options: dict[str, Any]
) -> None:
    found = []
    for folder in ("here", "there"):
        (example / folder / "api").mkdir(parents=True)
        (example / folder / "api" / folder).write_text(folder)
        monkeypatch.chdir(example / folder)
        found.append(fingerprint(KVPolicyConfig(name, options=options)))
    assert found[0] == found[1]
