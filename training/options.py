"""Command-line options that the trainers share, and what they stand for."""

import argparse
import hashlib
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from transformers import AutoTokenizer

from training import option
from training.model import Base, load_base
from training.rows import Maker, ReasonerRows, Rows, read_reasoner, read_rows
from vllm_kvpolicy.commands.outputs import new_folder

# That of https://github.com/EMCLab-Sinica/WG-KV/blob/a6943894/scripts/train.py.
INSTRUCTION = "Please analyze and summarize the following text:"
LEAST = {"sinks": 0, "seed": 0, "hold_steps": 0, "fade_steps": 0}  # others: 1


def check_numbers(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    """End the command if an integer is too small, or the warm-up too long."""
    for name, value in vars(given).items():
        least = LEAST.get(name, 1)
        if isinstance(value, int) and not isinstance(value, bool) and value < least:
            parser.error(f"{name}: got {value}, expected at least {least}")
    if not 0 <= getattr(given, "warmup", 0) < 1:
        parser.error(f"warmup: got {given.warmup}, expected a number in [0, 1)")


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the model and the output folder."""
    parser.add_argument("model", help="folder or name, as for transformers")
    told = "folder to write to"
    parser.add_argument("--output", type=new_folder, required=True, help=told)


def add_rows(
    parser: argparse.ArgumentParser, length: int, validation_rows: int
) -> None:
    """Add the source and the size of rows; both numbers are defaults."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--text",
        type=Path,
        help='UTF-8 text, or .jsonl with one {"text": ...} or {"messages": [...]} '
        "object per line",
    )
    source.add_argument(
        "--reasoner",
        action="store_true",
        help="train on problems of this repository's reasoner; MODEL must be a "
        "reasoner checkpoint",
    )
    option(parser, "--length", int, length, "tokens per row, at most")
    parser.add_argument(
        "--shortest",
        type=int,
        help="skip lines of .jsonl whose text has fewer tokens (default: --length)",
    )
    told = "rows held out for validation"
    option(parser, "--validation-rows", int, validation_rows, told)
    parser.add_argument(
        "--instruction",
        default=INSTRUCTION,
        help="user message put before each text; '' for text without a chat template",
    )
    parser.add_argument(
        "--loss-on",
        choices=("all", "answers"),
        default="all",
        help="tokens whose predictions the loss compares with the teacher's: all, or "
        "those of the assistant's turns, in rows with messages (default: all)",
    )


def add_schedule(parser: argparse.ArgumentParser, plain: Any) -> None:
    """Add what rows are seen of, and for how long.

    Args:
        plain: settings whose values are the defaults.
    """
    option(parser, "--window", int, plain.window, "newest tokens that every query sees")
    option(parser, "--sinks", int, plain.sinks, "first tokens that are always kept")
    option(parser, "--steps", int, plain.steps, "optimiser steps of a run")
    option(parser, "--rows-per-step", int, plain.rows_per_step, "rows per step")
    option(parser, "--learning-rate", float, plain.learning_rate, "peak learning rate")
    told = "fraction of the steps used for warm-up"
    option(parser, "--warmup", float, plain.warmup, told)
    told = "random seed of the order of rows and, if any are drawn, of initial weights"
    option(parser, "--seed", int, plain.seed, told)


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add the device, threads and dtype."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    told = "torch device; under a launcher, cuda is a GPU for each process"
    option(parser, "--device", str, device, told)
    parser.add_argument(
        "--threads", type=int, help="CPU threads (default: torch's choice)"
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="dtype of the model (default: bfloat16 on a GPU, on a CPU that multiplies "
        "it and if the launcher has --mixed_precision bf16, else float32)",
    )


def add_machine(parser: argparse.ArgumentParser) -> None:
    """Add the device, memory and how often the state is saved."""
    add_device(parser)
    parser.add_argument(
        "--gradient-checkpointing",
        action="store_true",
        help="keep the inputs of layers only, and compute layers again in the backward "
        "pass",
    )
    option(parser, "--save-steps", int, 100, "steps between two saves of the state")
    parser.add_argument(
        "--keep-teacher",
        action="store_true",
        help="keep the teacher's hidden states in OUTPUT/teacher, 2 or 4 bytes per "
        "token and channel, so that rows that come again cost it nothing",
    )


PRECISIONS = {"no": None, "bf16": "bfloat16"}  # of launchers, and our dtype


def rows_of(given: argparse.Namespace) -> Rows | ReasonerRows:
    """Return the rows of the options; see `add_rows`.

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
    maker = Maker(
        tokenizer, given.length, given.instruction, answers_only, given.shortest
    )
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
        if given.shortest is not None:
            source += f", at least {given.shortest} tokens"
    loss = ", loss on answers" if given.loss_on == "answers" else ""
    return f"{given.model}, {source}, length {given.length}{loss}"


def settings_of(given: argparse.Namespace, kind: Any, **own: Any) -> Any:
    """Return the settings of a run, but for its own those of the options.

    Args:
        kind: a dataclass with the field `data`.
        own: fields that differ from the options of their name.
    """
    names = {item.name for item in fields(kind)} - own.keys() - {"data"}
    same = {name: getattr(given, name) for name in names}
    return kind(data=words_of(given), **own, **same)


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
    is_native = torch.device(given.device).type != "cpu" or any(
        torch.cpu.get_capabilities().get(name) for name in ("amx_bf16", "avx512_bf16")
    )
    name = given.dtype or PRECISIONS[precision]
    return getattr(torch, name or ("bfloat16" if is_native else "float32"))


def base_of(given: argparse.Namespace) -> Base:
    """Load the model of the options, which stays as it is.

    Raises:
        ValueError: see `load_base` and `device_of`.
    """
    if given.threads:
        torch.set_num_threads(given.threads)
    return load_base(
        given.model,
        device_of(given),
        dtype_of(given),
        gradient_checkpointing=given.gradient_checkpointing,
        kept=kept_of(given),
    )


def kept_of(given: argparse.Namespace) -> Path | None:
    """Return the folder of the teacher's hidden states."""
    return given.output / "teacher" if given.keep_teacher else None


def _state_of(given: argparse.Namespace) -> AcceleratorState:
    """Return what accelerate knows of this process; it joins the others first."""
    on_cpu = torch.device(given.device).type == "cpu"
    return Accelerator(cpu=on_cpu, device_placement=False).state
