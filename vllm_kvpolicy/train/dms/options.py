"""The command line of `vllm-kvpolicy train dms`."""

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


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options; a wrong one ends the process."""
    parser = argparse.ArgumentParser(
        prog="vllm-kvpolicy train dms",
        description="Train a model to drop tokens (DMS). The defaults are NVIDIA's "
        "recipe for Qwen3-8B with an adapter, or the paper's with a borrowed "
        "channel. The same command resumes an interrupted run.",
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
        parser.error(
            f"alpha_offset: got {given.alpha_offset}, expected a finite number"
        )
    rising = [1.0, *given.targets]
    if any(b <= a or b == math.inf for a, b in zip(rising, rising[1:], strict=False)):
        parser.error(
            f"targets: got {given.targets}, expected increasing numbers above 1"
        )
    if given.flavour == "adapter" and given.fade_steps:
        parser.error(
            "fade_steps: only for --flavour borrowed, leave it out with an adapter"
        )


def _add_method(parser: argparse.ArgumentParser) -> None:
    """Add the options of the method; None means the default of the flavour."""
    parser.add_argument(
        "--flavour",
        choices=tuple(SETTINGS),
        default="adapter",
        help="adapter: added layers decide and the model is unchanged; borrowed: a "
        "query channel decides and all weights are trained (default: adapter)",
    )

    def add(name: str, kind: Any, text: str, **more: Any) -> None:
        flag = "--" + name.replace("_", "-")
        both = " or ".join(
            dict.fromkeys(str(getattr(plain, name)) for plain in SETTINGS.values())
        )
        told = f"{text} (default: {both})"
        parser.add_argument(flag, type=kind, help=told, **more)

    text = "compression ratios to reach in turn; each writes a result"
    add("targets", float, text, nargs="+", metavar="RATIO")
    add("steps_per_ratio", float, "steps over which the ratio rises by 1")
    add("hold_steps", int, "steps to hold the ratio at each target")
    add("fade_steps", int, "steps over which borrowed channels fade out at the start")
    add("window", int, "preceding tokens that a query always sees")
    add("alpha_scale", float, "scale of the decision logit")
    add("alpha_offset", float, "offset subtracted from the scaled logit")
    add("temperature", float, "temperature of the decisions in training")
    text = "weight of the loss term for dropping too few tokens"
    add("compression_weight", float, text)
    add("rows_per_step", int, "rows per step")
    add("learning_rate", float, "learning rate of Adam")
    add("hold_rate", float, "factor on the learning rate while the ratio is held")
    add("seed", int, "random seed of noise and row order")
