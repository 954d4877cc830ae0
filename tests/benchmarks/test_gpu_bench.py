"""The GPU benchmark's own logic, part by part, on a CPU with a model of two layers.

Engines are in this process here; the rehearsal gives each a process of its own.
"""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import events, process
from benchmarks.gpu.decode import Decode
from benchmarks.gpu.engine import BenchEngine, EngineSpec
from benchmarks.gpu.events import Events
from benchmarks.gpu.kernel_checks import MUTATED, check_operation
from benchmarks.gpu.kernel_inputs import CPU, MAKERS, SMALL_SIZES, operations
from benchmarks.gpu.models import token_bytes
from benchmarks.gpu.parts import Options, Verdict
from benchmarks.gpu.record import Record
from benchmarks.gpu.serving import PARTS as CONTESTS
from benchmarks.gpu.serving import POLICY, PRESSURE, STOCK, ratio
from benchmarks.gpu.timing import EVENT, PHASES
from benchmarks.workload import Workload

TOKENS = tuple(range(10, 90))


class HereProcess:
    started: list[str] = []

    def __init__(self, spec: EngineSpec) -> None:
        self.started.append(spec.name)
        self.engine = BenchEngine(spec)

    def wait_ready(self) -> dict[str, Any]:
        return self.engine.describe()

    def call(self, method: str, **arguments: Any) -> Any:
        found = getattr(self.engine, method)(**arguments)
        assert self.engine.pool.get_num_free_blocks() == (
            self.engine.pool.num_gpu_blocks - 1
        )
        return json.loads(json.dumps(found))

    def close(self) -> None:
        self.engine.close()


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Engines in this process; the names of those that were started."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    monkeypatch.setattr(process, "EngineProcess", HereProcess)
    monkeypatch.setattr(HereProcess, "started", [])
    torch.set_num_threads(1)
    return HereProcess.started


def run(part: str, folder: Path) -> tuple[int, dict[str, Any]]:
    words = [part, "--model", "tiny", "--out", str(folder), "--seconds", "3000"]
    status = command.main(words)
    return status, json.loads((folder / f"gpu-{part}-tiny.json").read_text())


def test_serving(
    tmp_path: Path, here: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    status, record = run("serving", tmp_path)
    cells = record["cells"]
    loads = "4 x (40 + 200), 0.7", "4 x (40 + 160), 0.65"
    names = [f"{load}, {name}" for load in loads for name in (STOCK, PRESSURE)]
    assert (status, list(cells)) == (0, [f"{name}, round 0" for name in names])
    printed = capsys.readouterr().out
    stock, ours, _, less = cells.values()
    assert ours["events"] > 1 and ours["blocks_returned"] > 1
    assert ours["preemptions"] == 0
    assert stock["events"] == 0 and stock["preemptions"] > 0
    # All have the same bytes: what a policy holds beside the pool comes off its pool.
    assert stock["engine"]["pool_bytes"] == ours["engine"]["pool_bytes"]
    assert ours["engine"]["blocks"] < stock["engine"]["blocks"]
    for tokens, cell in ((200, stock), (200, ours), (160, less)):
        assert cell["complete"] and len(cell["ttft_s"]) == 4
        assert len(cell["step_ms"]) == len(cell["running"]) == cell["steps"] >= tokens
        assert cell["output_tok_s"] * cell["wall_s"] == pytest.approx(4 * tokens)
    assert stock["engine"]["policy"] is None and stock["engine"]["prefix_caching"]
    assert ours["engine"]["policy"]["budget"] == 96
    assert ours["engine"]["policy"]["events"] == "pressure"
    assert record["runs"][0]["sources"] and "| load, share " in printed
    assert f"{loads[0]}, {PRESSURE}: output tok/s" in printed
    # Again: what is there is not measured, and who measures nothing is not started.
    here.clear()
    path = tmp_path / "gpu-serving-tiny.json"
    del record["cells"][f"{names[-1]}, round 0"]
    path.write_text(json.dumps(record))
    status, again = run("serving", tmp_path)
    assert (status, here, len(again["cells"])) == (0, [PRESSURE], len(names))
    assert again["cells"].items() >= record["cells"].items()


def test_a_pool_is_made_smaller_for_a_round(tmp_path: Path) -> None:
    """Its scheduler knows: a policy admits and calls for events by what is there."""
    policy = {"policy": POLICY, "budget": 96, "interval": 32, "events": "pressure"}
    spec = EngineSpec(PRESSURE, "tiny", tmp_path, 4096, 512, 8, policy)
    engine = BenchEngine(spec)
    workload = Workload(TOKENS, (40,) * 4, 160, 0)
    whole, half = (engine.round(workload, 0, share=share) for share in (1.0, 0.25))
    assert (whole["events"], whole["preemptions"]) == (0, 0)
    assert half["events"] > 0 and half["preemptions"] == 0
    assert engine.pool.get_num_free_blocks() == engine.pool.num_gpu_blocks - 1
    engine.close()


def test_decode_steps_and_events(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, record = run("decode", tmp_path)
    assert status == 0 and record["cells"]["copy"]["bytes_per_second"] > 1e7
    held = {name: cell.get("held_tokens") for name, cell in record["cells"].items()}
    # Two requests of 160 tokens and a few more; the policy has cut them down.
    assert 320 < held["160, stock"] < 350
    assert 160 <= held["160, ams-tova"] < 300
    assert len(record["cells"]["96, stock"]["step_ms"]) == 6
    status, record = run("events", tmp_path)
    assert status == 0
    spent = events.phases(record["cells"]["ams-tova, interval 48, round 0, phases"])
    assert all(spent[part] > 0 for part in (EVENT, "usage", "select", "compact"))
    assert spent["tables"] > 0 and 0 < spent["rest"] < spent[EVENT] < spent["decode"]
    streaming = record["cells"]["streaming, interval 64, round 0, phases"]
    assert "window_usage" not in streaming["spans_ms"] and streaming["events"] > 3
    assert "events / decode time" in capsys.readouterr().out


def test_attention_beside_the_time_to_read_what_is_kept(tmp_path: Path) -> None:
    """Of kernels in a profile, which only a GPU has."""
    part = Decode().tiny()
    options = Options("tiny", tmp_path, 9.0)
    record = Record(tmp_path / "x.json", "decode", {})
    record.cells["copy"] = {"bytes_per_second": 1e9}
    kernels = {"flash_fwd": 0.25, "reshape_and_cache_flash": 9.0, "gemm": 9.0}
    engine = {"cache_dtype": "auto"}
    cell = {"median_ms": 2.0, "held_tokens": 500, "kernels_ms": kernels}
    record.cells["96, stock"] = cell | {"engine": engine, "median_ms": 3.0}
    record.cells["96, ams-tova"] = cell | {"engine": engine}
    # 500 tokens of 2 layers, 2 heads, keys and values of 32 numbers of 2 bytes.
    found = {each.name: each.value for each in part.verdicts(record, options)}
    floor = 500 * 2 * 2 * 2 * 32 * 2 / 1e9 / 0.25e-3
    assert found["96: bandwidth floor / attention"] == pytest.approx(floor)
    assert found["96: decode speed"] == 1.5
    lines = part.table(record, options)[1]
    assert lines[1][3] == "1.50 x" and lines[1][5:] == ["0.250", "0.256", "1.02", "1"]


def test_kernels_are_timed(tmp_path: Path) -> None:
    status, record = run("kernels", tmp_path)
    times = [cell["ms"] for cell in record["cells"].values() if "ms" in cell]
    assert status == 0 and len(times) == len(MAKERS) and min(times) > 0


def test_what_takes_too_long_is_cut_off(tmp_path: Path) -> None:
    spec = EngineSpec("stock", "tiny", tmp_path, 4096, 512, 8)
    engine = BenchEngine(spec)
    workload = Workload(TOKENS, (30,) * 3, 400, 0)
    engine.round(Workload(TOKENS, (30,), 3, 0), 0)
    cut = engine.round(workload, 0, limit_s=0.1)
    assert not cut["complete"] and cut["requests_begun"] == 3
    assert cut["steps"] < 400
    whole = engine.round(Workload(TOKENS, (30,) * 3, 20, 0), 0)
    assert whole["complete"] and whole["peak_running"] == 3
    assert engine.pool.get_num_free_blocks() == engine.pool.num_gpu_blocks - 1
    engine.close()


def test_what_was_cut_off_is_no_ratio() -> None:
    """Stock's contexts are still short then."""
    whole = {"complete": True, "output_tok_s": 3.0}
    cut = {"complete": False, "output_tok_s": 9.0}
    for ours, base, expected in ((whole, whole, 1.0), (cut, whole, None)):
        for pair in ({"x": ours, STOCK: base}, {"x": base, STOCK: ours}):
            assert ratio(pair, "x", "output_tok_s") == expected
    assert ratio({"x": whole}, "x", "output_tok_s") is None


def test_verdicts() -> None:
    words = [
        Verdict("x", value, 2.0, at_most)
        for value in (1.9, 2.0, 2.1)
        for at_most in (False, True)
    ]
    met = ["MISSED", "met", "met", "met", "met", "MISSED"]
    assert [each.row()[3] for each in words] == met
    assert words[0].row()[:3] == ["x", "1.900", ">= 2"]


def test_time_ends_a_run_and_the_next_goes_on(tmp_path: Path) -> None:
    record = Record(tmp_path / "x.json", "kernels", {"model": "tiny"})
    options = Options("tiny", tmp_path, seconds=50.0)
    options.measure(record, "long", 60.0, lambda: {"ms": 1.0})
    options.measure(record, "short", 10.0, lambda: {"ms": 2.0})
    again = Record(tmp_path / "x.json", "kernels", {"model": "tiny"})
    assert again.cells == {"short": {"ms": 2.0, "run": 0}}
    Options("tiny", tmp_path, 99.0).measure(again, "long", 60.0, lambda: {"ms": 1.0})
    assert again.cells["long"] == {"ms": 1.0, "run": 1}
    with pytest.raises(ValueError, match="x.json: holds settings"):
        Record(tmp_path / "x.json", "kernels", {"model": "other"})


@pytest.mark.parametrize("part", ["serving", "check"])
def test_without_a_gpu_nothing_is_measured(part: str, tmp_path: Path) -> None:
    assert not torch.cuda.is_available()
    assert command.main([part, "--out", str(tmp_path / "never")]) == 2
    assert not (tmp_path / "never").exists()


GIB = 2**30
SMALL_CARD, LARGE_CARD = 85_017_493_504, 150_000_000_000


@pytest.mark.parametrize("card", [SMALL_CARD, LARGE_CARD])
@pytest.mark.parametrize(
    ("part", "num_groups"), [("serving", (1, 2)), ("contest", (2, 2))]
)
def test_real_engines_fit_on_the_gpu(
    part: str,
    num_groups: tuple[int, int],
    card: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Together, or else in groups; a longest request fits into each."""
    about = SimpleNamespace(total_memory=card)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: about)
    options = Options("llama-3.1-8b", tmp_path, 480.0)
    assert token_bytes(options.model) == 131072
    contest = CONTESTS[part]
    specs = contest.specs(options)
    groups = process.groups_that_fit(specs, card)
    assert len(groups) == num_groups[card == SMALL_CARD]
    for group in groups:
        pools = [spec.pool_bytes / GIB for spec in group]
        assert sum(pools) + len(pools) * (15 + 3.5) < card / GIB - 1
    for load in contest.loads:
        workload = contest.warm_up(load)
        for prompt in (*workload.prompt_tokens, load.prompt_tokens):
            longest = prompt + workload.output_tokens
            assert longest < specs[0].max_model_len <= load.pool_tokens
        assert load.pool_tokens <= specs[0].pool_tokens
    plan = Decode().fitting(options)
    assert plan.contexts[-1] == (16384 if card == SMALL_CARD else 32768)
    specs = [plan.engine(name, options) for name in plan.engines]
    groups = process.groups_that_fit(specs, card)
    small, large = [["stock"], ["ams-tova", "fp8"]], [["stock", "ams-tova"], ["fp8"]]
    expected = small if card == SMALL_CARD else large
    assert [[spec.name for spec in group] for group in groups] == expected
    specs = Events().engines(options)
    assert len(process.groups_that_fit(specs, card)) == 1


# -- operations ------------------------------------------------------------------------


def test_every_operation_has_inputs() -> None:
    assert {label.partition(",")[0] for label in MAKERS} == set(operations())
    timed = [name for names in PHASES.values() for name in names]
    assert set(timed) <= set(operations()) and len(timed) == len(set(timed))


FIELDS = {"window_usage": "mean", "segment_quota": "quotas", "assign_pages": "pages"}
FIELDS["survivor_moves"] = "source"


@pytest.mark.parametrize("label", MAKERS)
def test_a_wrong_result_is_found(label: str, monkeypatch) -> None:
    """One number of one output is off."""
    operation = operations()[label.partition(",")[0]]

    def wrong(**arguments: Any) -> Any:
        result = operation.reference(**arguments)
        changed = MUTATED | {"page_tables": ["lengths"], "save_rows": ["saved"]}
        target = result
        if operation.name in changed:
            target = arguments[changed[operation.name][-1]]
        elif operation.name in FIELDS:
            target = getattr(result, FIELDS[operation.name])
        elif isinstance(result, tuple):
            target = result[0]
        if operation.name == "save_rows":
            target = target[1:]  # the first row is nobody's
        spot = target[(0,) * (target.ndim - 1)]
        spot[:1] = ~spot[:1] if spot.dtype == torch.bool else spot[:1] + 3
        return result

    reference = operation.reference
    monkeypatch.setattr(
        operation,
        "implementation",
        lambda which: reference if which == "reference" else wrong,
    )
    found = check_operation(label, SMALL_SIZES["small"], 11, CPU, ["triton"])
    assert len(found) == 1 and "differ, first at" in found[0]
