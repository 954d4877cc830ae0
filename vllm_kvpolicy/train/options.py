"""Command-line options that both trainers share."""

import argparse
from pathlib import Path
from typing import Any

import torch

from vllm_kvpolicy.commands.outputs import new_folder

# That of https://github.com/EMCLab-Sinica/WG-KV/blob/a6943894/scripts/train.py.
INSTRUCTION = "Please analyze and summarize the following text:"
LEAST = {"sinks": 0, "seed": 0, "hold_steps": 0, "fade_steps": 0}  # others: 1


def option(
    parser: Any, flag: str, kind: Any, default: Any, text: str, **more: Any
) -> None:
    """Add an option whose help text ends with its default."""
    told = f"{text} (default: {default})"
    parser.add_argument(flag, type=kind, default=default, help=told, **more)


def check_integers(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    """End the command if an integer is too small."""
    for name, value in vars(given).items():
        least = LEAST.get(name, 1)
        if isinstance(value, int) and not isinstance(value, bool) and value < least:
            parser.error(f"{name}: got {value}, expected at least {least}")


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
    option(parser, "--length", int, length, "tokens per row")
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


def add_machine(parser: argparse.ArgumentParser) -> None:
    """Add the device, threads, dtype, memory and how often the state is saved."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    told = "torch device; under a launcher, cuda is a GPU for each process"
    option(parser, "--device", str, device, told)
    parser.add_argument(
        "--gradient-checkpointing",
        action="store_true",
        help="keep the inputs of layers only, and compute layers again in the backward "
        "pass",
    )
    option(parser, "--save-steps", int, 100, "steps between two saves of the state")
    parser.add_argument(
        "--threads", type=int, help="CPU threads (default: torch's choice)"
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="dtype of the model (default: bfloat16 on a GPU or if the launcher has "
        "--mixed_precision bf16, else float32)",
    )
