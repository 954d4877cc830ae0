"""The GPU benchmark's own logic, part by part, on a CPU with a model of two layers.

Engines are in this process here; that each has a process of its own otherwise is tried
with one that fails at once.
"""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import admission_part, event_part, process
from benchmarks.gpu.engine import BenchEngine, EngineSpec
from benchmarks.gpu.kernel_checks import check_operation
from benchmarks.gpu.kernel_inputs import CPU, MAKERS, SMALL_SIZES, operations
from benchmarks.gpu.models import token_bytes
from benchmarks.gpu.plan import Options
from benchmarks.gpu.record import Record
from benchmarks.gpu.serving_parts import CONTESTS
from benchmarks.gpu.timing import EVENT, PHASES
from benchmarks.workload import Workload

SETTINGS = {"enforce_eager": True, "block_size": 32}
TOKENS = tuple(range(10, 90))


class HereProcess:
    """Stands in for EngineProcess, with the engine in this process."""

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
    """Run a part; return its status and its record."""
    words = [part, "--model", "tiny", "--out", str(folder), "--seconds", "3000"]
    status = command.main(words, SETTINGS)
    return status, json.loads((folder / f"gpu-{part}-tiny.json").read_text())


def test_the_minimum_set(
    tmp_path: Path, here: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    status, record = run("min", tmp_path)
    assert (status, len(record["cells"])) == (0, 4)
    printed = capsys.readouterr().out
    cells = record["cells"]
    stock = cells["200 in, 4096 out, share 0.7, stock, round 0"]
    ours = cells["200 in, 4096 out, share 0.7, budget 96, round 0"]
    whole = cells["200 in, 4096 out, share 1, stock, round 0"]
    assert ours["events"] > 4 and ours["blocks_returned"] > 0
    assert stock["events"] == whole["events"] == 0
    assert stock["blocks"] < whole["blocks"] and stock["preemptions"] > 0
    # What a policy holds beside the pool comes off its pool, but where all have room.
    assert ours["blocks"] < stock["blocks"]
    roomy = cells["200 in, 4096 out, share 1, budget 96, round 0"]
    assert roomy["blocks"] == whole["blocks"]
    assert roomy["preemptions"] == whole["preemptions"] == 0
    for cell in (stock, ours, whole):
        assert cell["complete"] and len(cell["ttft_s"]) == 4
        assert len(cell["step_ms"]) == len(cell["running"]) == cell["steps"] > 199
        assert cell["output_tok_s"] * cell["wall_s"] == pytest.approx(800)
    assert whole["engine"]["policy"] is None and whole["engine"]["prefix_caching"]
    assert ours["engine"]["policy"]["budget"] == 96
    assert record["runs"][0]["sources"] and "| share" in printed
    assert "share 1, budget 96 (preempted 0 : 0): p99 ITL" in printed
    # Again: everything is there, and nothing is started.
    here.clear()
    status, again = run("min", tmp_path)
    assert (status, here, again["cells"]) == (0, [], cells)


def test_decode_steps_and_events(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, record = run("c", tmp_path)
    assert status == 0 and record["cells"]["copy"]["bytes_per_second"] > 1e7
    held = {name: cell.get("held_tokens") for name, cell in record["cells"].items()}
    # Two requests of 160 tokens and a few more; the policy has cut them down.
    assert 320 < held["160, stock"] < 350
    assert 160 <= held["160, ams-tova"] < 300
    assert len(record["cells"]["96, stock"]["step_ms"]) == 6
    status, record = run("d", tmp_path)
    assert status == 0
    spent = event_part.phases(record["cells"]["ams-tova, interval 48, round 0, phases"])
    assert all(spent[part] > 0 for part in (EVENT, "usage", "select", "compact"))
    assert spent["tables"] > 0 and 0 < spent["rest"] < spent[EVENT] < spent["decode"]
    streaming = record["cells"]["streaming, interval 64, round 0, phases"]
    assert "usage" not in streaming["phases_ms"] and streaming["events"] > 3
    assert "events / decode time" in capsys.readouterr().out


@pytest.mark.parametrize("part", ["e", "f", "g"])
def test_kernel_parts(part: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(command.kernel_part, "TINY_SCRIPTS", {})
    status, record = run(part, tmp_path)
    assert status == 0
    times = [cell["ms"] for cell in record["cells"].values() if "ms" in cell]
    assert len(times) >= 5 and min(times) > 0
    if part == "g":
        assert record["cells"]["prepare"]["results"][0]["build_ms"]["ours"] > 0


def test_attention_of_admitted_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A prompt of four chunks, of which the first, the third and the last are timed."""
    status, record = run("h", tmp_path)
    cells = record["cells"]
    assert status == 0 and len(cells) == 7
    for kind in admission_part.KINDS:
        cell = cells[f"192 tokens; prefill; {kind}"]
        assert list(cell["timed"]) == ["0", "96", "144"] and cell["chunks"] == 4
        first, third, last = cell["timed"].values()
        between = (first + third) / 2
        assert cell["ms"] == pytest.approx(first + between + third + last)
        assert cells[f"192 tokens; decode; {kind}"]["ms"] > 0
    printed = capsys.readouterr().out
    assert "192 tokens, prefill: dense / until" in printed and ">= 1.9" in printed


@pytest.mark.parametrize("start", [0, 8, 48, 191])
def test_layers_hold_and_see_what_admission_says(start: int) -> None:
    """Rows are as long as what is kept, and masked as tokens say themselves."""
    (scene,) = admission_part.TINY_SCENES
    count = min(scene.chunk, scene.tokens - start)
    made = {
        kind: admission_part.Layer(scene, kind, CPU) for kind in admission_part.KINDS
    }
    steps = {kind: layer.step(start, count).args for kind, layer in made.items()}
    assert (steps["dense"][4] == start + count).all()
    settled = made["until"].settled(start)
    local = min(start, scene.window)
    assert torch.equal(steps["until"][4], settled + local + count)
    assert torch.equal(steps["compacted"][4], steps["until"][4])
    tables, until = steps["until"][3].long(), steps["until"][7]
    for head, length in enumerate(steps["until"][4].tolist()):
        found = until[tables[head]].flatten()[:length]
        every = made["until"].until_of[head, : start + count]
        is_settled = torch.arange(start + count) < start - local
        held = every[~is_settled | (every == 2**31 - 1)]
        assert torch.equal(found, held)
    assert (until[tables] < 2**31 - 1).any()
    assert (steps["compacted"][7][tables] == 2**31 - 1).all()


def test_what_takes_too_long_is_cut_off(tmp_path: Path) -> None:
    spec = EngineSpec("stock", "tiny", tmp_path, 4096, 512, 8, settings=SETTINGS)
    engine = BenchEngine(spec)
    workload = Workload(TOKENS, (30,) * 3, 400, 0)
    engine.round(Workload(TOKENS, (30,), 3, 0), 0)
    cut = engine.round(workload, 0, limit_s=0.1)
    assert not cut["complete"] and cut["requests_begun"] == 3
    assert cut["steps"] < 400
    whole = engine.round(Workload(TOKENS, (30,) * 3, 20, 0), 0)
    assert whole["complete"] and whole["peak_running"] == 3
    assert engine.pool.get_num_free_blocks() == engine.pool.num_gpu_blocks - 1
    with pytest.raises(ValueError, match="pool: expected 1 to"):
        engine.round(workload, 0, pool_bytes=10**9)
    engine.close()


def test_time_ends_a_run_and_the_next_goes_on(tmp_path: Path) -> None:
    record = Record(tmp_path / "x.json", "e", {"model": "tiny"})
    options = Options("tiny", tmp_path, seconds=50.0)
    options.measure(record, "long", 60.0, lambda: {"ms": 1.0})
    options.measure(record, "short", 10.0, lambda: {"ms": 2.0})
    assert options.left == ["long"]
    again = Record(tmp_path / "x.json", "e", {"model": "tiny"})
    assert again.cells == {"short": {"ms": 2.0, "run": 0}}
    Options("tiny", tmp_path, 99.0).measure(again, "long", 60.0, lambda: {"ms": 1.0})
    assert again.cells["long"] == {"ms": 1.0, "run": 1}
    with pytest.raises(ValueError, match="x.json: holds settings"):
        Record(tmp_path / "x.json", "e", {"model": "other"})


def test_without_a_gpu_nothing_is_measured(tmp_path: Path) -> None:
    assert not torch.cuda.is_available()
    assert command.main(["min", "--out", str(tmp_path / "never")]) == 2
    assert not (tmp_path / "never").exists()


def test_real_pools_fit_on_the_gpu() -> None:
    """Weights, pools, and 6 GiB for each engine beside these, on 139 GiB."""
    gib = 2**30
    assert token_bytes("llama-3.1-8b") == 131072
    options = Options("llama-3.1-8b", Path(), 480.0)
    for contests in CONTESTS.values():
        for contest in contests.values():
            pools = [
                spec.pool_tokens * 131072 / gib for spec in contest.engines(options)
            ]
            assert sum(pools) + len(pools) * (15 + 6) < 139, contest


@pytest.mark.parametrize(
    ("card", "part", "expected"),
    [
        (85_017_493_504, "a", [["stock", "ams-tova"], ["fp8"]]),
        (85_017_493_504, "min-32", [["stock", "ams-tova"]]),
        (85_017_493_504, "min", [["stock"], ["ams-tova"]]),
        (150_000_000_000, "min", [["stock", "ams-tova"]]),
    ],
)
def test_engines_are_together_as_far_as_they_fit(
    card: int, part: str, expected: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    about = SimpleNamespace(total_memory=card)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: about)
    options = Options("llama-3.1-8b", Path(), 480.0)
    contest = next(iter(CONTESTS[part].values()))
    groups = process.groups_that_fit(contest.engines(options), options.card_bytes)
    assert [[spec.name for spec in group] for group in groups] == expected


# -- operations ------------------------------------------------------------------------


def test_every_operation_has_inputs_and_a_phase() -> None:
    assert {label.partition(",")[0] for label in MAKERS} == set(operations())
    assert set(PHASES) == set(operations())


@pytest.mark.parametrize("label", MAKERS)
def test_a_wrong_result_is_found(label: str, monkeypatch) -> None:
    """One number of one output is off."""
    operation = operations()[label.partition(",")[0]]

    def wrong(**arguments: Any) -> Any:
        result = operation.reference(**arguments)
        changed = {
            "compact_pages": "pages",
            "page_tables": "lengths",
            "head_page_tables": "offsets",
            "save_rows": "saved",
            "until_attention": "output",
            "page_bounds": "bounds",
            "write_until": "until",
            "enter_requests": "num_global",
            "write_survivors": "local",
        }.get(operation.name)
        target = arguments[changed] if changed else result
        if operation.name == "window_usage":
            target = result.mean
        elif operation.name == "segment_quota":
            target = result.quotas
        elif operation.name == "assign_pages":
            target = result.pages
        elif operation.name == "survivor_moves":
            target = result.source
        elif operation.name in ("must_keep_tokens", "credited_mass"):
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
    found = check_operation(label, SMALL_SIZES["small"], 11, CPU, "triton")
    assert len(found) == 1 and "differ, first at" in found[0]
