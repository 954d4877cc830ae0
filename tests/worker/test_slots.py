"""Slots of requests: one rule for tables from the first token and the first event."""

import numpy as np
import pytest
import torch

from vllm_kvpolicy.worker.request_slots import RequestSlots, Slots
from vllm_kvpolicy.worker.slots import SlotTable


@pytest.fixture(params=["first token", "first event"])
def slots(request: pytest.FixtureRequest) -> Slots:
    if request.param == "first token":
        return RequestSlots(2)
    return SlotTable(2, 3, 4, torch.device("cpu"))


def test_slots_are_handed_out_once_and_come_back(slots: Slots) -> None:
    assert {slots.take_one("a"), slots.take_one("b")} == {0, 1}
    first = slots.take_one("a")
    assert len(slots) == 2
    with pytest.raises(IndexError):
        slots.take_one("c")
    slots.drop(["a", "unknown", "a"])
    assert len(slots) == 1
    assert slots.take_one("c") == first


def test_rows_of_others_and_padding_are_nobodys(slots: Slots) -> None:
    mine = slots.take_one("a")
    rows = slots.rows(["unknown", "a"], 4)
    assert rows.dtype == np.int64
    assert rows.tolist() == [slots.null_slot, mine, slots.null_slot, slots.null_slot]
    assert len(slots) == 1
