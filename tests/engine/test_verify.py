"""`vllm-kvpolicy verify MODEL`: well as it is, and not with a kernel that is broken."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm.triton_utils import dispatcher

from support.cpu import needs_float8
from support.engine.helpers import keep_kernels
from vllm_kvpolicy import __main__ as command
from vllm_kvpolicy.commands import verify as verify_command
from vllm_kvpolicy.commands import verify_engine as engine
from vllm_kvpolicy.commands.judge import PASSED
from vllm_kvpolicy.commands.trials import TRIALS, Trial
from vllm_kvpolicy.events import LAST_PHASE, EventPlan
from vllm_kvpolicy.kernels.compact_pages import compact_pages, compact_pages_ref

MOVED = "identity: tokens that were moved give "


def broken(pages, source_slots, dest_slots, first, in_place=None):
    """Copy the tokens of one head from the page after theirs."""
    wrong = source_slots.clone()
    wrong[: int(first[1])] += pages.shape[1]
    compact_pages_ref(pages, wrong, dest_slots, first, in_place)


@pytest.fixture(autouse=True, scope="module")
def kernels_kept() -> None:
    """Engines of this file replace kernels once, as those of others; for good."""
    register: Callable[..., None] = dispatcher.register_kernels

    def once(overrides: Any) -> None:
        register(overrides)
        keep_kernels()

    dispatcher.register_kernels = once


@pytest.mark.slow
def test_a_healthy_engine(tiny_model: Path, capsys: pytest.CaptureFixture) -> None:
    assert command.main(["verify", str(tiny_model)]) == 0
    printed = capsys.readouterr()
    for part in ("healthy (", "ams-tova, budget 128", "C++ for compact_pages", MOVED):
        assert part in printed.out, printed.out
    states = [line.split()[0] for line in printed.out.splitlines() if line.strip()]
    assert states.count("ok") == 7 and "FAILED" not in states
    assert "verify: starting stock vLLM" in printed.err


def test_a_policy_that_moves_is_checked_as_one() -> None:
    config, sizes = verify_command._config({"policy": "identity"}), engine.Sizes(192)
    (name, values), movers, (policy, _) = engine._engines(config, sizes, Trial())
    assert (name, values, policy) == ("stock vLLM", None, "identity")
    assert [name for name, _ in movers] == ["identity", "identity of own lengths"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *("windows", "heads", "sinks", "ngram", "latents"),
        pytest.param("fp8", marks=needs_float8),
    ],
)
def test_a_feature_that_works(name: str) -> None:
    """Drafts as well, whose second engine starts as on a GPU, see `keep_kernels`."""
    trial, config, states = TRIALS[name], verify_command._config({}), []
    for check in engine.trial_checks(trial, ["float32"], config, print):
        assert check.result == PASSED and check.name.startswith("float32, "), check
        states.append(check.result)
    # Heads of own lengths are moved, too; drafts are counted, and FP8's beginnings.
    counts = {"ngram": 12, "fp8": 11, "windows": 10, "heads": 10}
    assert len(states) == counts.get(name, 7)


@pytest.mark.parametrize(
    "what",
    [
        pytest.param(None, id="model"),
        pytest.param("fp8", marks=needs_float8),
        pytest.param("windows", marks=pytest.mark.slow),
        pytest.param("sinks", marks=pytest.mark.slow),
    ],
)
def test_a_kernel_that_copies_from_a_wrong_page(
    what: str | None,
    tiny_model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compact_pages, "implementation", lambda which: broken)
    plain = [str(tiny_model), "--kv-policy", "tova"]
    words = plain if what is None else ["--feature", what]
    assert command.main(["verify", *words]) == 1
    assert not (tmp_path / "vllm-kvpolicy").exists()
    lines = capsys.readouterr().out.splitlines()
    assert any(
        line.startswith("FAILED") and MOVED in line and "differs from output" in line
        for line in lines
    ), lines
    # What no token passes through is as it was.
    (ample,) = (line for line in lines if "a budget of 512 tokens" in line)
    assert ample.startswith("ok ") and "NOT HEALTHY" in lines[-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "states"),
    [
        # Without a budget of its own; a prompt that would be kept whole.
        (["--kv-policy", "quest"], {"ok": 5, "open": 2}),
        (["--kv-policy", "rpc", "--kv-interval", "96"], {"ok": 7}),
    ],
    ids=["quest", "rpc"],
)
def test_policies_whose_events_are_not_the_default_ones(
    flags: list[str],
    states: dict[str, int],
    tiny_model: Path,
    capsys: pytest.CaptureFixture,
) -> None:
    assert command.main(["verify", str(tiny_model), *flags]) == 0
    text = capsys.readouterr().out
    words = [line.split()[0] for line in text.splitlines() if line.strip()]
    found = {state: words.count(state) for state in ("ok", "open", "FAILED")}
    assert found == {"ok": 0, "open": 0, "FAILED": 0, **states}, text


@pytest.mark.parametrize("phase", [0, 2**31, LAST_PHASE])
@pytest.mark.parametrize(
    ("budget", "interval"),
    [(68, 16), (128, 64), (128, 512), (512, 64), (2048, 512), (3000, 3000)],
)
def test_every_request_has_an_event_and_an_ample_budget_none(
    budget: int, interval: int, phase: int
) -> None:
    sizes = engine.Sizes(budget + interval)
    for prompt in sizes.prompts:
        total = prompt + engine.OUTPUT_TOKENS
        plan = EventPlan(prompt, budget, interval, 4096, phase)
        assert plan.next_event(0) < total <= sizes.longest
        ample = EventPlan(prompt, sizes.longest, interval, 4096, phase)
        assert ample.next_event(0) >= total
    assert sizes.num_blocks * 16 > len(sizes.prompts) * sizes.longest


def test_an_engine_that_does_not_start_is_reported(
    tiny_model: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken_start(*arguments: object) -> None:
        raise RuntimeError("no kernel\nimage")

    monkeypatch.setattr(engine, "Engine", broken_start)
    assert command.main(["verify", str(tiny_model)]) == 1
    text = capsys.readouterr().out
    assert (
        "FAILED  stock vLLM: the engine starts  RuntimeError: no kernel image" in text
    )
    assert "NOT HEALTHY" in text


def test_numbers_that_no_request_of_the_model_outgrows(
    tiny_model: Path, capsys: pytest.CaptureFixture
) -> None:
    words = ["verify", str(tiny_model), "--kv-budget", "100000"]
    assert command.main(words) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert "--kv-budget and --kv-interval: got 100000 and 64, expected at most" in last


@pytest.mark.parametrize(
    "flag",
    [("--kv-events", "pressure"), ("--kv-budget", "auto"), ("--kv-ceiling", "512")],
)
def test_the_checks_are_of_events_at_known_positions(
    flag: tuple[str, str], tiny_model: Path, capsys
) -> None:
    assert command.main(["verify", str(tiny_model), *flag]) == 2
    expected = f"{flag[0]}: got {flag[1]}, expected another value or none"
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "interval"),
    [({}, 64), ({"policy": "expected"}, 128), ({"interval": 96}, 96)],
)
def test_the_interval_fits_the_window(flags: dict[str, object], interval: int) -> None:
    assert verify_command._config(flags).interval_tokens == interval


def test_a_model_that_is_not_there(tmp_path: Path, capsys) -> None:
    assert command.main(["verify", str(tmp_path)]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("vllm-kvpolicy verify: error: ") and str(tmp_path) in last
