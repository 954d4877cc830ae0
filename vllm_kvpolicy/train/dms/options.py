"""The command line of the trainer of DMS."""

import argparse
import math
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from vllm_kvpolicy.train.dms.settings import ADAPTER, BORROWED
from vllm_kvpolicy.train.options import (
    add_machine,
    add_model,
    add_rows,
    check_integers,
)

LENGTHS = {"adapter": 32768, "borrowed": 8192}  # tokens of a row
SETTINGS = {"adapter": ADAPTER, "borrowed": BORROWED}
POSITIVE = (
    "steps_per_ratio",
    "alpha_scale",
    "temperature",
    "compression_weight",
    "learning_rate",
    "hold_rate",
)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; `arguments` are those of the process unless given."""
    parser = argparse.ArgumentParser(
        prog="python -m vllm_kvpolicy.train.dms",
        description="Train a model to drop tokens (DMS). The defaults are those of "
        "NVIDIA's recipe for Qwen3-8B with an adapter, the paper's with borrowed "
        "channels. A run that was cut off goes on when the same command is given.",
    )
    add_model(parser)
    add_rows(parser, length=0, validation_rows=64)
    _add_method(parser)
    add_machine(parser)
    given = parser.parse_args(arguments)
    plain = SETTINGS[given.flavour]
    given.length = given.length or LENGTHS[given.flavour]
    for item in fields(plain):
        if getattr(given, item.name, None) is None:
            setattr(given, item.name, getattr(plain, item.name))
    given.targets = tuple(given.targets)
    check_integers(parser, given)
    _check(parser, given)
    return given


def _check(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    """Refuse what no run can be made of."""
    for name in POSITIVE:
        value = getattr(given, name)
        if not 0 < value < math.inf:
            parser.error(f"{name}: got {value}, expected a number above 0")
    if not math.isfinite(given.alpha_offset):
        parser.error(f"alpha_offset: got {given.alpha_offset}, expected a number")
    rising = [1.0, *given.targets]
    if any(b <= a or b == math.inf for a, b in zip(rising, rising[1:], strict=False)):
        parser.error(
            f"targets: got {given.targets}, expected rising numbers, each above 1"
        )
    if given.flavour == "adapter" and given.fade_steps:
        parser.error("fade_steps: got a number, expected none with an adapter")


def _add_method(parser: argparse.ArgumentParser) -> None:
    """Add what `Settings` are made of; None stands for the default of the flavour."""
    parser.add_argument(
        "--flavour",
        choices=tuple(SETTINGS),
        default="adapter",
        help="adapter: layers of its own decide and the model stays as it is; "
        "borrowed: a channel of its queries does and all weights are trained "
        "(default: adapter)",
    )

    def add(name: str, kind: Any, text: str, **more: Any) -> None:
        flag = "--" + name.replace("_", "-")
        both = " or ".join(
            dict.fromkeys(str(getattr(plain, name)) for plain in SETTINGS.values())
        )
        told = f"{text} (default: {both})"
        parser.add_argument(flag, type=kind, help=told, **more)

    text = "compression ratios that are reached in turn, with a result each"
    add("targets", float, text, nargs="+", metavar="RATIO")
    add("steps_per_ratio", float, "steps in which the ratio rises by 1")
    add("hold_steps", int, "steps for which it rests at each target")
    add("fade_steps", int, "steps in which borrowed channels fade, before all that")
    add("window", int, "a query sees all tokens up to so many before it")
    add("alpha_scale", float, "factor on what decides")
    add("alpha_offset", float, "subtracted from that")
    add("temperature", float, "of decisions in training")
    text = "factor on the loss for too few tokens dropped"
    add("compression_weight", float, text)
    add("rows_per_step", int, "rows per step")
    add("learning_rate", float, "of Adam")
    add("hold_rate", float, "factor on the learning rate while the ratio rests")
    add("seed", int, "of noise and order of rows")
