"""The command line of the trainer of write gates.

Called by train.wgkv.
Process: any
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from vllm_kvpolicy.train.wgkv_loop import Settings

LAMBDAS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56)  # the authors' grid
LEAST = {"sinks": 0, "seed": 0}  # of integers; of others 1
INSTRUCTION = "Summarize what the following text says."


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; `arguments` are those of the process unless given."""
    parser = argparse.ArgumentParser(
        prog="python -m vllm_kvpolicy.train.wgkv",
        description="Train write gates (WG-KV) for a model; the defaults are the "
        "authors'. A run that was cut off goes on when the same command is given.",
    )
    parser.add_argument("model", help="folder or name, as for transformers")
    parser.add_argument("--output", type=Path, required=True, help="folder to write to")
    _add_rows(parser)
    _add_method(parser)
    _add_machine(parser)
    given = parser.parse_args(arguments)
    for name, value in vars(given).items():
        least = LEAST.get(name, 1)
        if isinstance(value, int) and not isinstance(value, bool) and value < least:
            parser.error(f"{name}: got {value}, expected at least {least}")
    if not 0 <= given.warmup < 1:
        parser.error(f"warmup: got {given.warmup}, expected 0 to below 1")
    if not 0 < given.threshold < 1:
        parser.error(f"threshold: got {given.threshold}, expected above 0, below 1")
    return given


def _option(parser: Any, flag: str, kind: Any, default: Any, text: str) -> None:
    """Add an option whose help tells its default."""
    told = f"{text} (default: {default})"
    parser.add_argument(flag, type=kind, default=default, help=told)


def _add_rows(parser: argparse.ArgumentParser) -> None:
    """Add what is trained on."""
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
    _option(parser, "--length", int, 4096, "tokens of a row")
    _option(parser, "--validation-rows", int, 750, "rows to measure the result on")
    parser.add_argument(
        "--instruction",
        default=INSTRUCTION,
        help="what a chat says before each text; '' for the text without a chat",
    )


def _add_method(parser: argparse.ArgumentParser) -> None:
    """Add what `Settings` and the result are made of."""
    plain = Settings(0)
    parser.add_argument(
        "--lambdas",
        type=float,
        nargs="+",
        default=LAMBDAS,
        help=f"sparsity weights, one file of gates each (default: {LAMBDAS})",
    )
    _option(parser, "--window", int, plain.window, "tokens that every query sees")
    _option(parser, "--sinks", int, plain.sinks, "first tokens that are always kept")
    _option(parser, "--threshold", float, 0.1, "tokens with a gate above are kept")
    _option(parser, "--steps", int, plain.steps, "optimiser steps per sparsity weight")
    _option(parser, "--rows-per-step", int, plain.rows_per_step, "rows per step")
    _option(parser, "--learning-rate", float, plain.learning_rate, "at its highest")
    _option(parser, "--weight-decay", float, plain.weight_decay, "of AdamW")
    _option(parser, "--warmup", float, plain.warmup, "share of the steps")
    _option(parser, "--seed", int, plain.seed, "of first weights and order of rows")
    parser.add_argument(
        "--expansion",
        type=float,
        help="hidden units of a gate per channel (default: 4 for llama, 1.5 for qwen3)",
    )


def _add_machine(parser: argparse.ArgumentParser) -> None:
    """Add where and how it runs."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    _option(parser, "--device", str, device, "as for torch")
    _option(parser, "--save-steps", int, 100, "steps between two states of a run")
    parser.add_argument(
        "--threads", type=int, help="on a CPU (default: torch's choice)"
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="of the model (default: bfloat16 on a GPU, else float32)",
    )
