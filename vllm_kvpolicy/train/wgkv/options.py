"""The command line of `vllm-kvpolicy train wgkv`."""

import argparse
from collections.abc import Sequence

from vllm_kvpolicy.train.options import (
    add_machine,
    add_model,
    add_rows,
    check_integers,
    option,
)
from vllm_kvpolicy.train.wgkv.loop import Settings

LAMBDAS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56)  # the authors' grid


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options; a wrong one ends the process."""
    parser = argparse.ArgumentParser(
        prog="vllm-kvpolicy train wgkv",
        description="Train write gates (WG-KV) for a model. The defaults are the "
        "authors'. The same command resumes an interrupted run.",
    )
    add_model(parser)
    add_rows(parser, length=4096, validation_rows=750)
    _add_method(parser)
    add_machine(parser)
    given = parser.parse_args(arguments)
    check_integers(parser, given)
    if not 0 <= given.warmup < 1:
        parser.error(f"warmup: got {given.warmup}, expected a number in [0, 1)")
    if not 0 < given.threshold < 1:
        parser.error(f"threshold: got {given.threshold}, expected a number in (0, 1)")
    return given


def _add_method(parser: argparse.ArgumentParser) -> None:
    """Add the options of the method."""
    plain = Settings(0)
    parser.add_argument(
        "--lambdas",
        type=float,
        nargs="+",
        default=LAMBDAS,
        help=f"sparsity weights; each writes one gate file (default: {LAMBDAS})",
    )
    option(parser, "--window", int, plain.window, "newest tokens that every query sees")
    option(parser, "--sinks", int, plain.sinks, "first tokens that are always kept")
    option(parser, "--threshold", float, 0.1, "tokens with a gate above this are kept")
    option(parser, "--steps", int, plain.steps, "optimiser steps per sparsity weight")
    option(parser, "--rows-per-step", int, plain.rows_per_step, "rows per step")
    option(parser, "--learning-rate", float, plain.learning_rate, "peak learning rate")
    option(parser, "--weight-decay", float, plain.weight_decay, "weight decay of AdamW")
    option(
        parser,
        "--warmup",
        float,
        plain.warmup,
        "fraction of the steps used for warm-up",
    )
    option(
        parser,
        "--seed",
        int,
        plain.seed,
        "random seed of initial weights and row order",
    )
    parser.add_argument(
        "--expansion",
        type=float,
        help="hidden units of a gate per channel (default: 4 for llama, 1.5 for qwen3)",
    )
