"""Tests of what servers measured: batches, figures, ratios to full KV, the file."""

import json
import lzma

import pytest

from benchmarks.accuracy import measured, results, summary
from support.report_data import SETTINGS as MADE_SETTINGS

SETTINGS = MADE_SETTINGS | {
    "policy_config": {"wgkv_gates": "gates.safetensors"},
    "variants": {"x": {"hard_mode": "dynamic"}},
}
FULL = ("full", None, None)
OURS = ("tova", 128, 64)


def batch(place: tuple, task: str, **changes) -> dict:
    """Return a batch of 10 answers that held 5 blocks each, and 8 at their longest."""
    made = dict(zip(measured.PLACE_FIELDS, (*place, task), strict=True))
    made |= {"answers": 10, "output_tokens": 2000, "seconds": 4.0, "clients": 16}
    made |= {"steps": 400.0, "request_steps": 2000.0, "block_steps": 10000.0}
    made |= {"requests": 10.0, "peak_blocks": 80.0}
    return made | changes


def answer(place: tuple, task: str, number: int = 0) -> dict:
    made = dict(zip(results.KEY_FIELDS, (*place, task, str(number), 0), strict=True))
    made |= {"digest": "00000000", "correct": True, "score": 1.0, "answer": "5"}
    made |= {"prompt_tokens": 50, "output_tokens": 200, "capped": False}
    return made | {"repeated": None, "seconds": 1.0}


def test_figures_of_a_batch():
    found = measured.figures([batch(OURS, "a:1")], 32)
    answers = {"answers": 10, "clients": 16, "tok_s": 500.0, "held_answers": 10}
    held = {"running": 5.0, "held_blocks": 5.0, "held_tokens": 160.0}
    assert found == answers | held | {"peak_blocks": 8.0, "peak_tokens": 256.0}


def test_batches_weigh_by_what_they_did():
    """Means are over all steps, requests and seconds, not over batches."""
    short = {"answers": 2, "requests": 2.0, "request_steps": 100.0, "clients": 2}
    short |= {"block_steps": 2000.0, "output_tokens": 100, "seconds": 6.0}
    short = batch(OURS, "b:1", **short)
    found = measured.figures([batch(OURS, "a:1"), short], 16)
    assert found["tok_s"] == 2100 / 10
    assert found["held_blocks"] == pytest.approx(12000 / 2100)
    assert found["peak_tokens"] == pytest.approx(16 * 160 / 12)
    assert (found["answers"], found["clients"]) == (12, 16)


def test_a_batch_beside_other_requests_says_nothing_of_blocks():
    shared = batch(OURS, "b:1", requests=11.0, block_steps=99999.0)
    silent = batch(OURS, "c:1", **dict.fromkeys(measured.COUNTERS))
    found = measured.figures([batch(OURS, "a:1"), shared, silent], 32)
    assert (found["answers"], found["held_answers"]) == (30, 10)
    assert (found["held_blocks"], found["tok_s"]) == (5.0, 500.0)
    alone = measured.figures([silent], 32)
    assert alone["held_tokens"] is alone["running"] is alone["peak_blocks"] is None
    assert alone["tok_s"] == 500.0


def test_rows_are_compared_with_full_kv_of_the_same_task():
    batches = [
        batch(FULL, "a:1"),
        batch(FULL, "b:1", block_steps=40000.0),
        batch(OURS, "a:1", seconds=2.0),
        batch(OURS, "b:1", seconds=8.0),
    ]
    lines = [answer(p, t, n) for p in (FULL, OURS) for t in ("a:1", "b:1")
             for n in range(10)]  # fmt: skip
    rows = summary.summarise(lines, SETTINGS, batches)["summary"]
    found = {(row["policy"], row["family"]): row["measured"] for row in rows}
    assert len(found) == len(rows) == 6
    held = {f: found["tova", f]["to_full"]["held_tokens"] for f in ("a:1", "b:1")}
    assert held["a:1"] == {"ratio": 1.0, "low": None, "high": None}
    assert held["b:1"]["ratio"] == 0.25
    pooled = found["tova", "all"]["to_full"]
    assert pooled["held_tokens"] == {"ratio": 0.4, "low": 0.25, "high": 1.0}
    assert pooled["tok_s"] == {"ratio": 0.8, "low": 0.5, "high": 2.0}
    assert found["full", "all"]["to_full"]["tok_s"]["ratio"] == 1.0
    text = summary.format_summary(rows)
    assert "| held | / full" in text
    (row,) = [r for r in text.splitlines() if "| tova" in r and "| all" in r]
    assert "| 160  | 0.40 (0.25 to 1.00) |" in row
    assert "| 400   | 0.80 (0.50 to 2.00) |" in row


def test_batches_stand_in_the_file_and_are_no_answers(tmp_path):
    rows = [{"settings": SETTINGS}, answer(OURS, "a:1"), {"batch": batch(OURS, "a:1")}]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    plain, packed = tmp_path / "one.jsonl", tmp_path / "two.jsonl.xz"
    plain.write_text(text + '{"batch": {"pol')
    other = text.replace('"id": "0"', '"id": "1"').replace("4.0", "5.0")
    packed.write_bytes(lzma.compress(other.encode()))
    assert [b["seconds"] for b in results.batches_of([plain, packed])] == [4.0, 5.0]
    settings, lines = results.merge([plain, packed])
    assert settings == SETTINGS and [line["id"] for line in lines] == ["0", "1"]
    assert len(results.continue_file(plain, SETTINGS)) == 1
    assert plain.read_text() == text
