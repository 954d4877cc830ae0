"""Every measure of what events keep, on cases worked out by hand."""

import numpy as np
import pytest

from support.made_traces import make_event, rows
from vllm_kvpolicy.observe import measures


def mask(text: str) -> np.ndarray:
    """Return one bool per character, True for `x`."""
    return np.array([letter == "x" for letter in text])


def test_masks_leave_out_padding():
    marked = measures.mask_of(rows([0, 2], [1]), 4)
    assert np.array_equal(marked, [[mask("x.x."), mask(".x..")]])


def test_overlap():
    iou, survival = measures.overlap(
        np.array([mask("xxx."), mask("xx..")]),
        np.array([mask("xx..xx"), mask("..xxxx")]),
    )
    assert iou.tolist() == [2 / 5, 0]
    assert survival.tolist() == [2 / 3, 0]


@pytest.mark.parametrize(
    ("text", "size", "percent", "expected"),
    [
        ("....x...xx", 4, 0, (1, 2)),
        ("....x...xx", 4, 25, (2, 2)),
        ("....x...xx", 4, 24, (1, 2)),
        ("....x....", 3, 0, (2, 3)),
        ("...", 4, 0, (0, 0)),
        ("x" + "." * 19, 20, 5, (1, 1)),
        ("xx" + "." * 18, 20, 5, (0, 1)),
    ],
)
def test_wiped_regions(text, size, percent, expected):
    assert measures.wiped_regions(mask(text), size, percent) == expected


@pytest.mark.parametrize(
    ("text", "expected"), [("xx.xxx.", 3), ("", 0), ("...", 0), ("xxx", 3), (".x", 1)]
)
def test_longest_run(text, expected):
    assert measures.longest_run(mask(text)) == expected


def test_kept_by_bin():
    kept, tokens = measures.kept_by_bin(mask("xx.x.xx"), 3, 7)
    # 3 * p // 7 is 0, 0, 0, 1, 1, 2, 2.
    assert (kept.tolist(), tokens.tolist()) == ([2, 1, 2], [3, 2, 2])
    kept, tokens = measures.kept_by_bin(np.array([mask("xx.x")]), 4, 8)
    assert (kept.tolist(), tokens.tolist()) == ([[2, 1, 0, 0]], [2, 2, 0, 0])
    kept, tokens = measures.kept_by_bin(mask("x."), 5, 2)
    assert (kept.sum(), tokens.sum(), tokens.max()) == (1, 2, 1)


def test_superblocks_round_up_and_are_those_of_the_fullest_rank():
    assert measures.superblocks(make_event(survivors=rows([0, 1, 2, 3], [4, 5]))) == 2
    heads = rows([0, 1, 2, 3, 4, 5], [6, 7])  # three pages and one
    assert measures.superblocks(make_event(survivors=heads)) == 2
    assert measures.superblocks(make_event(survivors=heads, ranks=2)) == 3
