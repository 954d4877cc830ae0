"""Options of the policies: their types, ranges, defaults and presets."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Options = Mapping[str, Any]


@dataclass(frozen=True)
class Param:
    """One key of `--kv-policy-config`.

    Args:
        name: the key.
        kind: "int", "float", "bool", "choice" or "path".
        default: value where neither the user nor a preset gives one.
        summary: one line, with the unit.
        minimum: smallest valid number.
        maximum: largest valid number, None if there is none.
        open_end: `maximum` itself is not valid.
        odd: only odd numbers are valid.
        choices: valid values of a choice.
        at_least: name of a key whose value this one must reach.
        required: None is not valid; otherwise a path may be left out.
        optional: None is valid, for a default that is known elsewhere.
        holds: what the file of a path holds, a kind of policies.calibration.
    """

    name: str
    kind: str
    default: Any
    summary: str
    minimum: float = 0
    maximum: float | None = None
    open_end: bool = False
    odd: bool = False
    choices: tuple[str, ...] = ()
    at_least: str | None = None
    required: bool = False
    optional: bool = False
    holds: str = ""

    @property
    def valid_range(self) -> str:
        """The valid values in words, for errors and docs."""
        if self.kind == "bool":
            return "true or false"
        if self.kind == "path":
            return f"a file: {self.summary}"
        if self.kind == "choice":
            return "one of " + ", ".join(self.choices)
        noun = "an integer" if self.kind == "int" else "a number"
        noun = "an odd integer" if self.odd else noun
        if self.maximum is None:
            words = f"{noun} >= {self.minimum:g}"
        else:
            end = ")" if self.open_end else "]"
            words = f"{noun} in [{self.minimum:g}, {self.maximum:g}{end}"
        return words if self.at_least is None else f"{words}, at least {self.at_least}"

    def accepts(self, value: Any) -> bool:
        """Tell whether `value` is valid by itself, `at_least` aside."""
        if value is None and self.optional:
            return True
        if self.kind == "choice":
            return isinstance(value, str) and value in self.choices
        if self.kind == "bool":
            return isinstance(value, bool)
        if self.kind == "path":
            is_left_out = value is None and not self.required
            return is_left_out or (isinstance(value, str) and bool(value))
        numbers = int if self.kind == "int" else (int, float)
        if isinstance(value, bool) or not isinstance(value, numbers):
            return False
        if not math.isfinite(value) or value < self.minimum:
            return False
        if self.odd and value % 2 == 0:
            return False
        if self.maximum is None:
            return True
        return value < self.maximum if self.open_end else value <= self.maximum


AMS_PRESETS: dict[str, dict[str, Any]] = {
    # Table 15 of the paper with the window of the authors' code: of the settings tried,
    # the one whose segment counts come closest to the paper's Table 14.
    "default": {
        "segment_mass": 0.1,
        "min_segment": 16,
        "max_segment": 256,
        "min_quota": 1,
        "sinks": 4,
        "recent": 32,
        "ema_decay": 0.9,
        "ema_mix": 0.9,
        "quotas": "mass",
        "segments": "mass",
        "fixed_segment": 128,
        "parity": False,
        "window": 32,
        "pool_kernel": 5,
        "suffix_pad": "max",
    },
}
_DEFAULT = AMS_PRESETS["default"]
# Table 15 as it stands; the paper leaves the number of recent tokens open.
AMS_PRESETS["paper"] = {**_DEFAULT, "window": 128}
# The defaults of the authors' evaluation registry.
AMS_PRESETS["code"] = {
    **_DEFAULT,
    "segment_mass": 0.02,
    "min_segment": 32,
    "max_segment": 1024,
    "min_quota": 8,
    "ema_decay": 0.8,
    "ema_mix": 0.7,
}

WINDOW = Param(
    "window",
    "int",
    _DEFAULT["window"],
    "queries in the attention window, tokens",
    1,
    maximum=1024,
)
POOL_KERNEL = Param(
    "pool_kernel",
    "int",
    _DEFAULT["pool_kernel"],
    "neighbours averaged over, tokens",
    1,
    255,
    odd=True,
)
RAGGED = Param(
    "ragged", "bool", False, "pages of all heads and layers change places too"
)
# Fields of AMSConfig that the server sets through --kv-sinks and --kv-recent.
_MUST_KEEP_PARAMS = (
    Param("sinks", "int", _DEFAULT["sinks"], "first tokens always kept"),
    Param("recent", "int", _DEFAULT["recent"], "newest tokens always kept"),
)
AMS_PARAMS = (
    Param(
        "preset",
        "choice",
        "default",
        "values of the keys that are not given",
        choices=tuple(AMS_PRESETS),
    ),
    Param(
        "segment_mass",
        "float",
        _DEFAULT["segment_mass"],
        "mass between cuts",
        0.001,
        1.0,
        open_end=True,
    ),
    Param(
        "min_segment",
        "int",
        _DEFAULT["min_segment"],
        "shorter segments are merged, tokens",
        1,
    ),
    Param(
        "max_segment",
        "int",
        _DEFAULT["max_segment"],
        "longer segments are split, tokens",
        1,
        at_least="min_segment",
    ),
    Param(
        "min_quota", "int", _DEFAULT["min_quota"], "tokens that each segment may keep"
    ),
    Param(
        "ema_decay",
        "float",
        _DEFAULT["ema_decay"],
        "old credit left by an event",
        0,
        1,
        open_end=True,
    ),
    Param(
        "ema_mix",
        "float",
        _DEFAULT["ema_mix"],
        "share of the current mass; 1 for no average over events",
        0,
        1,
    ),
    Param(
        "quotas",
        "choice",
        _DEFAULT["quotas"],
        "segments share the budget by mass, or equally",
        choices=("mass", "uniform"),
    ),
    Param(
        "segments",
        "choice",
        _DEFAULT["segments"],
        "cut by mass, or into blocks of `fixed_segment`",
        choices=("mass", "fixed"),
    ),
    Param(
        "fixed_segment",
        "int",
        _DEFAULT["fixed_segment"],
        "block length without cuts by mass, tokens",
        1,
    ),
    WINDOW,
    POOL_KERNEL,
    Param(
        "suffix_pad",
        "choice",
        _DEFAULT["suffix_pad"],
        "mass of each of the newest `window` tokens",
        choices=("max", "mean", "none"),
    ),
    Param("parity", "bool", _DEFAULT["parity"], "follow the authors' code literally"),
)
_RANGES = {param.name: param for param in AMS_PARAMS + _MUST_KEEP_PARAMS}


def check_ams_range(name: str, values: Options) -> None:
    """Check one AMS parameter.

    Args:
        name: a key of `AMS_PARAMS`, or "sinks" or "recent".
        values: all of them, for limits that depend on each other.

    Raises:
        ValueError: naming the parameter, its value and the valid range.
    """
    check(_RANGES[name], values)


def check(param: Param, values: Options) -> None:
    """Check the value that `values` holds for `param`.

    Raises:
        ValueError: naming the parameter, its value and the valid range.
    """
    value = values[param.name]
    valid = param.accepts(value)
    if valid and param.at_least is not None and param.at_least in values:
        valid = value >= values[param.at_least]
    if not valid:
        raise ValueError(f"{param.name}: got {value!r}, expected {param.valid_range}")
