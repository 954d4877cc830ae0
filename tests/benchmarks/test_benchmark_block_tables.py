"""What layouts cost, against counting by hand and against the plugin's own tables."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks.kernels import bench_block_tables
from benchmarks.kernels.bench_block_tables import Account, Case, HeadPages, accounts
from vllm_kvpolicy.worker.tiers.head_tables import SPARE

CPU = torch.device("cpu")
PAPER = Case(layers=36, heads=8, requests=32, page=16, tokens=20480)
SMALL = Case(layers=3, heads=2, requests=3, page=4, tokens=96)
CASES = pytest.mark.parametrize("case", [PAPER, SMALL], ids=["paper", "small"])


def rows(case: Case) -> list[list[int]]:
    """Tokens that each head of each layer keeps."""
    return [
        [
            max(1, round(case.tokens * 0.5 * 0.93389**layer * 0.87215**head))
            for head in range(case.heads)
        ]
        for layer in range(case.layers)
    ]


def up(number: int, unit: int) -> int:
    return -(-number // unit)


@CASES
def test_every_layout_keeps_the_same_and_holds_what_it_loads(case: Case) -> None:
    total = sum(map(sum, rows(case)))
    for cost in accounts(case).values():
        assert cost.kept == total
        assert total <= cost.loaded <= cost.held
        superblock = case.layers * case.heads * case.page
        assert cost.held == cost.superblocks * superblock
        assert cost.held - cost.loaded < superblock


@CASES
def test_the_papers_layouts_load_one_length_everywhere(case: Case) -> None:
    kept, heads = rows(case), case.layers * case.heads
    lengths = {
        "sparse": case.tokens,
        "rewrite": up(sum(map(sum, kept)), heads),
        "max": max(map(max, kept)),
        "sum": max(map(sum, kept)),
    }
    costs = accounts(case)
    assert {name: costs[name].loaded for name in lengths} == {
        name: length * heads for name, length in lengths.items()
    }
    assert {name: costs[name].rewritten for name in lengths} == {
        name: 0 if name == "sparse" else sum(map(sum, kept)) for name in lengths
    }
    masked = {
        name: case.requests
        * (4 * case.heads * up(length, case.page) + heads * up(length, 8))
        for name, length in lengths.items()
        if name != "rewrite"
    }
    assert {name: costs[name].table_bytes for name in masked} == masked
    equal = costs["rewrite"].superblocks
    assert costs["rewrite"].table_bytes == 4 * case.requests * equal


@CASES
def test_ours_is_within_a_superblock_of_the_pages(case: Case) -> None:
    heads = case.layers * case.heads
    pages = [up(count, case.page) for layer in rows(case) for count in layer]
    ours = accounts(case)["ours"]
    assert 0 <= ours.superblocks * heads - sum(pages) < heads
    assert ours.loaded == ours.rewritten == sum(pages) * case.page
    assert ours.loaded - ours.kept < heads * case.page


def test_the_plugin_builds_what_is_accounted() -> None:
    ours = HeadPages(SMALL, CPU)
    ours.verify()
    batch = ours.build()
    local = SMALL.layers * SMALL.requests * SMALL.heads
    size = batch.tables.nbytes + batch.lengths.nbytes
    # One column more for the newest tokens, and those that requests may grow into.
    columns = 1 + SPARE
    assert size == accounts(SMALL)["ours"].table_bytes + 4 * local * columns
    assert int(batch.lengths.sum()) == (
        SMALL.requests * accounts(SMALL)["ours"].loaded + local
    )
    assert ours.build_again().tables.data_ptr() == batch.tables.data_ptr()
    assert ours.build().tables is not batch.tables
    assert len(ours.event_ms) == SMALL.requests


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "tables.json"
    sizes = "--tokens 64 96 --pages 4 --layers 3 --heads 2 --requests 3 --repeats 2"
    bench_block_tables.main([*sizes.split(), "--out", str(out)])
    record = json.loads(out.read_text())
    assert [result["tokens"] for result in record["results"]] == [64, 96]
    small = record["results"][1]
    layouts = {name: Account(**cost) for name, cost in small["layouts"].items()}
    assert layouts == accounts(SMALL)
    assert small["build_ratio"].keys() == {*layouts, "ours, same lists"}
    assert small["build_ratio"]["rewrite"] == 1
    assert all(ratio > 0 for ratio in small["build_ratio"].values())
    assert "git_commit" in record["provenance"]
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 2 * len(layouts)
    assert len({line.count("|") for line in lines}) == 1
