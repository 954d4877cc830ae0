"""Rows of requests, whose table has the same from the first event on."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vllm_kvpolicy.worker.request_table import RequestRows, RequestTable


def test_rows_are_handed_out_once_and_come_back() -> None:
    table = RequestRows(2)
    assert sorted(table.take_all(["a", "b"], 3)) == [0, 1, table.null_row]
    first = table.take("a")
    assert len(table) == 2
    with pytest.raises(IndexError):
        table.take("c")
    table.drop(["a", "unknown", "a"])
    assert len(table) == 1
    assert table.take("c") == first


def test_rows_of_others_and_padding_are_nobodys() -> None:
    table = RequestRows(2)
    mine = table.take("a")
    rows = table.rows(["unknown", "a"], 4)
    assert rows.dtype == np.int64
    assert rows.tolist() == [table.null_row, mine, table.null_row, table.null_row]
    assert len(table) == 1


def test_tokens_since_the_last_event_are_the_requests_own() -> None:
    """A new request has the row of one whose event was at another position."""
    table = RequestTable(2, 3, 4, torch.device("cpu"))
    table.positions_cpu[:] = 100
    first, later, pinned = (
        SimpleNamespace(position=140, ordinal=n, pinned_blocks=blocks)
        for n, blocks in ((0, ()), (1, (7, 8)), (0, (7, 8)))
    )
    assert table.fresh_tokens([0], [pinned]) == 140 - 2 * 4
    assert table.fresh_tokens([0], [first]) == 140
    assert table.fresh_tokens([1], [later]) == 40
    assert table.fresh_tokens([1, 0], [later, first]) == 140
