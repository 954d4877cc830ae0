"""The options that both trainers have: rows, machine, and how they are checked."""

import argparse
from pathlib import Path
from typing import Any

import torch

INSTRUCTION = "Summarize what the following text says."
LEAST = {"sinks": 0, "seed": 0, "hold_steps": 0, "fade_steps": 0}  # of others 1


def option(
    parser: Any, flag: str, kind: Any, default: Any, text: str, **more: Any
) -> None:
    """Add an option whose help tells its default."""
    told = f"{text} (default: {default})"
    parser.add_argument(flag, type=kind, default=default, help=told, **more)


def check_integers(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    """Refuse integers that are too small."""
    for name, value in vars(given).items():
        least = LEAST.get(name, 1)
        if isinstance(value, int) and not isinstance(value, bool) and value < least:
            parser.error(f"{name}: got {value}, expected at least {least}")


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add what is trained for, and where results go."""
    parser.add_argument("model", help="folder or name, as for transformers")
    parser.add_argument("--output", type=Path, required=True, help="folder to write to")


def add_rows(
    parser: argparse.ArgumentParser, length: int, validation_rows: int
) -> None:
    """Add what is trained on; the numbers are defaults."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--text",
        type=Path,
        help="UTF-8 text, or .jsonl with one object with 'text' per line",
    )
    source.add_argument(
        "--reasoner",
        action="store_true",
        help="problems and traces of the repository's own model, MODEL",
    )
    option(parser, "--length", int, length, "tokens of a row")
    told = "rows to measure the result on"
    option(parser, "--validation-rows", int, validation_rows, told)
    parser.add_argument(
        "--instruction",
        default=INSTRUCTION,
        help="what a chat says before each text; '' for the text without a chat",
    )


def add_machine(parser: argparse.ArgumentParser) -> None:
    """Add where and how it runs."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    option(parser, "--device", str, device, "as for torch")
    option(parser, "--save-steps", int, 100, "steps between two states of a run")
    parser.add_argument(
        "--threads", type=int, help="on a CPU (default: torch's choice)"
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="of the model (default: bfloat16 on a GPU, else float32)",
    )
