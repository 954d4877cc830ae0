"""Makes what policies read of a model: gates, adapters, calibration files."""

from typing import Any


def option(
    parser: Any, flag: str, kind: Any, default: Any, text: str, **more: Any
) -> None:
    """Add an option whose help text ends with its default."""
    told = f"{text} (default: {default})"
    parser.add_argument(flag, type=kind, default=default, help=told, **more)
