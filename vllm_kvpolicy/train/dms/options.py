"""The command line of `python -m vllm_kvpolicy.train.dms`."""

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
        "channels. The same command continues an interrupted run.",
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
    """End the command if a number is out of range."""
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
    """Add the options of the method; None means the default of the flavour."""
    parser.add_argument(
        "--flavour",
        choices=tuple(SETTINGS),
        default="adapter",
        help="adapter: added layers decide, the model is not changed; borrowed: a "
        "channel of the queries decides, all weights are trained "
        "(default: adapter)",
    )

    def add(name: str, kind: Any, text: str, **more: Any) -> None:
        flag = "--" + name.replace("_", "-")
        both = " or ".join(
            dict.fromkeys(str(getattr(plain, name)) for plain in SETTINGS.values())
        )
        told = f"{text} (default: {both})"
        parser.add_argument(flag, type=kind, help=told, **more)

    text = "compression ratios to reach one after the other, each with a result"
    add("targets", float, text, nargs="+", metavar="RATIO")
    add("steps_per_ratio", float, "steps in which the ratio rises by 1")
    add("hold_steps", int, "steps that the ratio rests at each target")
    add("fade_steps", int, "steps at the start in which borrowed channels fade")
    add("window", int, "tokens before each query that it always sees")
    add("alpha_scale", float, "factor on the number that decides")
    add("alpha_offset", float, "subtracted from the product")
    add("temperature", float, "temperature of decisions in training")
    text = "weight of the loss for dropping too few tokens"
    add("compression_weight", float, text)
    add("rows_per_step", int, "rows per step")
    add("learning_rate", float, "learning rate of Adam")
    add("hold_rate", float, "factor on the learning rate while the ratio rests")
    add("seed", int, "for noise and the order of rows")
