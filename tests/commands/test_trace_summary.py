"""What `vllm-kvpolicy trace report` prints of traces made by hand."""

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from support.made_traces import make_event, rows, run_request, write_trace
from vllm_kvpolicy.commands.trace import LABELS, main, summarise

SINKS = 4


def newest(held: np.ndarray) -> np.ndarray:
    """Keep sinks and the newest, half of what is held."""
    return np.append(held[:SINKS], held[len(held) // 2 + SINKS :])


def test_one_event_by_hand(tmp_path):
    event = make_event(
        held=rows(range(10), [0, 2, 5, 6, 7, 8, 9]),
        selected=rows([0, 6, 7, 8, 9], [0, 2, 6, 7, 8, 9]),
        survivors=rows([0, 3], [0, 5]),
    )
    got = summarise(write_trace(tmp_path, [event]))["snapkv"]
    assert (got["requests"], got["events"]) == (1, 1)
    assert got["burst"] == (2 + 1) / 2  # positions 1, 2 or 4, 5; position 2
    assert got["utilisation"] == 10 / 12  # 3 and 5 fill pages, 2 found no room
    assert (got["head_budget"], got["head_spread"]) == (5.5, 0.5)
    assert got["retention"][:8:2] == [1, 0, 0, 0.5]
    assert not {"iou", "memory_time", "lse_drop", "wiped_16_0"} & set(got)


def test_a_sliding_window_shares_nothing_but_sinks(tmp_path):
    events = run_request(newest, policy="streaming", sinks=SINKS)
    got = summarise(write_trace(tmp_path, events))["streaming"]
    assert got["iou"] == SINKS / (2 * 64 - SINKS)
    assert got["survival"] == SINKS / 64
    assert got["burst"] == 64
    # Of the 124 tokens behind the sinks the first 64 are dropped, the rest kept.
    assert (got["wiped_16_0"], got["wiped_64_0"]) == (4 / 7, 1)
    assert (got["retention"][5], got["retention"][-1]) == (0, 1)


def test_a_known_region_is_wiped_out(tmp_path):
    # 100 tokens, sinks 4, local from 84 on: regions of 16 start at 4, 20, 36, 52, 68.
    survivors = [p for p in range(84) if not 20 <= p < 52 or p == 40]
    fields = {"held": rows(range(100)), "survivors": rows(survivors)}
    event = make_event(position=100, frontier=84, sinks=4, **fields)
    got = summarise(write_trace(tmp_path, [event]))["snapkv"]
    assert got["wiped_16_0"] == got["gone_16_0"] == 1 / 5  # 36 to 51 keep position 40
    assert got["wiped_32_0"] == got["wiped_32_5"] == 0
    assert got["burst"] == 20


def test_regions_of_positions_count_what_was_dropped_before(tmp_path):
    # Of 64 positions the head holds 32, every second one, and keeps all of those.
    even = range(0, 64, 2)
    event = make_event(
        position=64, frontier=64, sinks=0, held=rows(even), survivors=rows(even)
    )
    old = replace(event, held=rows(range(32, 64)), survivors=rows(range(32, 64)))
    got = summarise(write_trace(tmp_path / "a", [event]))["snapkv"]
    assert (got["wiped_32_5"], got["gone_32_5"]) == (0, 0)
    got = summarise(write_trace(tmp_path / "b", [old]))["snapkv"]
    assert (got["wiped_32_5"], got["gone_32_5"]) == (0, 0.5)


def test_memory_time_runs_from_first_to_last_event(tmp_path):
    events = run_request(newest, events=3)
    got = summarise(write_trace(tmp_path, events))["snapkv"]
    # 4 superblocks of survivors, and 1, 2, 3, 4 in turn for 16 steps each, twice.
    total = 2 * 16 * (5 + 6 + 7 + 8)
    dense = 16 * sum(range(9, 17))
    assert got["memory_time"] == total
    assert got["memory_time_share"] == total / dense


def test_memory_time_leaves_the_prompt_out(tmp_path):
    events = [replace(event, prompt=160) for event in run_request(newest, events=2)]
    got = summarise(write_trace(tmp_path, events))["snapkv"]
    assert got["memory_time"] == 16 * (7 + 8)  # tokens 160 to 191


@pytest.mark.parametrize("before", [1, 2])
def test_a_preempted_request_starts_anew(tmp_path, before):
    events = run_request(newest, events=2)
    got = summarise(write_trace(tmp_path / "a", events[:before] + events))["snapkv"]
    alone = summarise(write_trace(tmp_path / "b", events))["snapkv"]
    assert got["events"] == before + 2
    assert got["iou"] == alone["iou"]
    assert got["memory_time"] == alone["memory_time"]


def test_notes_are_averaged_and_policies_kept_apart(tmp_path):
    notes = {
        "lse_drop": np.array([[0.5, 1.5]], np.float32),
        "density_90": np.array([[0.25, 0.75]], np.float32),
        "segments": np.array([[[[0, 4], [4, 10], [10, 10]], [[0, 9], [9, 9], [9, 9]]]]),
    }
    two_heads = rows(range(10), range(9))
    fields = {"held": two_heads, "selected": two_heads, "survivors": two_heads}
    events = [
        make_event(policy="ams-tova", ordinal=ordinal, notes=notes, **fields)
        for ordinal in range(2)
    ]
    other = make_event(request_id="r1")
    got = summarise(write_trace(tmp_path, [*events, other]))
    assert list(got) == ["ams-tova", "snapkv"]
    ams = got["ams-tova"]
    assert (ams["lse_drop"], ams["request_lse_drop"]) == (1.0, 2.0)
    assert ams["density_90"] == 0.5
    assert (ams["segments"], ams["segment_tokens"]) == (1.5, 19 / 3)
    assert "segments" not in got["snapkv"]


def test_the_command_prints_a_table_and_writes_json(tmp_path):
    events = [*run_request(newest), *run_request(newest, policy="streaming")]
    folder, file = write_trace(tmp_path / "trace", events), tmp_path / "out.json"
    command = [sys.executable, "-m", "vllm_kvpolicy", "trace", "report", folder]
    done = subprocess.run(
        [*command, "--json", file], capture_output=True, text=True, timeout=100
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = {
        line.split("  ")[0]: line.split()[-2:] for line in done.stdout.splitlines()
    }
    assert lines[""] == ["snapkv", "streaming"]
    assert lines[LABELS["events"]] == ["4", "4"]
    assert lines[LABELS["survival"]] == ["0.062", "0.062"]
    assert json.loads(file.read_text()) == summarise(folder)


def test_a_full_disk_is_told_with_option_and_path(tmp_path):
    folder = write_trace(tmp_path / "trace", run_request(newest))
    with pytest.raises(ValueError, match="^--json: cannot write '/dev/full': No space"):
        main(["report", str(folder), "--json", "/dev/full"])
