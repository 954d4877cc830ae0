"""What layouts cost, against the record and against the plugin's own tables."""

import json
from dataclasses import asdict, fields
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import packed
from benchmarks.kernels import bench_block_tables
from benchmarks.kernels.bench_block_tables import Account, Case, HeadPages, accounts
from benchmarks.report.__main__ import RESULTS
from vllm_kvpolicy.worker.tiers.head_tables import SPARE

CPU = torch.device("cpu")
SMALL = Case(layers=3, heads=2, requests=3, page=4, tokens=96)
ON_FILE = json.loads(packed.read_text(RESULTS / "block_tables.json.xz"))["results"]


@pytest.mark.parametrize("row", ON_FILE, ids=lambda row: f"{row['tokens']}")
def test_layouts_cost_what_the_paper_was_compared_by(row: dict[str, Any]) -> None:
    """The record's costs were counted head by head, page by page."""
    case = Case(*(row[field.name] for field in fields(Case)))
    assert {name: asdict(cost) for name, cost in accounts(case).items()} == row[
        "layouts"
    ]
    kept = [
        max(1, round(case.tokens * 0.5 * 0.93389**layer * 0.87215**head))
        for layer, head in product(range(case.layers), range(case.heads))
    ]
    pages = sum(-(-tokens // case.page) for tokens in kept)
    ours = accounts(case)["ours"]
    assert (ours.kept, ours.loaded) == (sum(kept), pages * case.page)
    assert 0 <= ours.superblocks * len(kept) - pages < len(kept)


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


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "tables.json"
    sizes = "--tokens 64 96 --pages 4 --layers 3 --heads 2 --requests 3 --repeats 2"
    bench_block_tables.main([*sizes.split(), "--out", str(out)])
    record = json.loads(out.read_text())
    assert [result["tokens"] for result in record["results"]] == [64, 96]
    small = record["results"][1]
    layouts = {name: Account(**cost) for name, cost in small["layouts"].items()}
    assert layouts == accounts(SMALL)
    assert small["build_ms"].keys() == {*layouts, "ours, same lists"}
    assert all(spent > 0 for spent in small["build_ms"].values())
    assert "git_commit" in record["provenance"]
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 2 * len(layouts)
    assert len({line.count("|") for line in lines}) == 1
