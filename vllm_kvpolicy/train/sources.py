"""Turns options that both trainers share into rows, devices and dtypes."""

import argparse
import hashlib
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from transformers import AutoTokenizer

from vllm_kvpolicy.train.reasoner_rows import ReasonerRows, read_reasoner
from vllm_kvpolicy.train.rows import Maker, Rows, read_rows

PRECISIONS = {"no": None, "bf16": "bfloat16"}  # of launchers, and our dtype


def rows_of(given: argparse.Namespace) -> Rows | ReasonerRows:
    """Return the rows of the options; see `options.add_rows`.

    Raises:
        ValueError: there are none, or too few.
    """
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    answers_only = given.loss_on == "answers"
    if given.reasoner:
        if answers_only:
            raise ValueError("loss_on: got 'answers' with --reasoner, expected 'all'")
        model = Path(given.model)
        return read_reasoner(model, tokenizer, given.length, given.validation_rows)
    maker = Maker(tokenizer, given.length, given.instruction, answers_only)
    return read_rows(given.text, maker, given.validation_rows)


def words_of(given: argparse.Namespace) -> str:
    """Return a description of the rows that distinguishes runs.

    A text is told by its content and by how many of its rows are held out: with others,
    a run that goes on would train on rows that it is measured on.
    """
    source = "reasoner"
    if given.text:
        with given.text.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        held_out = f"{given.validation_rows} rows held out"
        source = f"{given.text} {given.instruction!r}, sha256 {digest}, {held_out}"
    loss = ", loss on answers" if given.loss_on == "answers" else ""
    return f"{given.model}, {source}, length {given.length}{loss}"


def device_of(given: argparse.Namespace) -> torch.device:
    """Return the device of this process.

    Raises:
        ValueError: one GPU for several processes, or a launcher that chose another kind
            of device.
    """
    device, state = torch.device(given.device), _state_of(given)
    if device.type != state.device.type:
        raise ValueError(
            f"device: got {given.device!r}, expected {state.device.type!r} as the "
            "launcher chose"
        )
    if state.num_processes == 1:
        return device
    if device.index is not None:
        raise ValueError(
            f"device: got {given.device!r} for {state.num_processes} processes, "
            f"expected {device.type!r}"
        )
    return state.device


def dtype_of(given: argparse.Namespace) -> torch.dtype:
    """Return the dtype of computation.

    Raises:
        ValueError: a mixed precision of the launcher that is not supported.
    """
    precision = _state_of(given).mixed_precision
    if precision not in PRECISIONS:
        raise ValueError(
            f"mixed_precision: got {precision!r}, expected one of {list(PRECISIONS)}"
        )
    on_gpu = torch.device(given.device).type != "cpu"
    name = given.dtype or PRECISIONS[precision]
    return getattr(torch, name or ("bfloat16" if on_gpu else "float32"))


def _state_of(given: argparse.Namespace) -> AcceleratorState:
    """Return what accelerate knows of this process; it joins the others first."""
    on_cpu = torch.device(given.device).type == "cpu"
    return Accelerator(cpu=on_cpu, device_placement=False).state
