"""Rows of requests: one rule for tables from the first token and the first event."""

import numpy as np
import pytest
import torch

from vllm_kvpolicy.worker.request_table import RequestRows, RequestTable


@pytest.fixture(params=["first token", "first event"])
def table(request: pytest.FixtureRequest) -> RequestRows:
    if request.param == "first token":
        return RequestRows(2)
    return RequestTable(2, 3, 4, torch.device("cpu"))


def test_rows_are_handed_out_once_and_come_back(table: RequestRows) -> None:
    assert {table.take("a"), table.take("b")} == {0, 1}
    first = table.take("a")
    assert len(table) == 2
    with pytest.raises(IndexError):
        table.take("c")
    table.drop(["a", "unknown", "a"])
    assert len(table) == 1
    assert table.take("c") == first


def test_rows_of_others_and_padding_are_nobodys(table: RequestRows) -> None:
    mine = table.take("a")
    rows = table.rows(["unknown", "a"], 4)
    assert rows.dtype == np.int64
    assert rows.tolist() == [table.null_row, mine, table.null_row, table.null_row]
    assert len(table) == 1
