"""A row of the table of what policies are refused with."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Refusal:
    """One feature that does not go together with a policy yet.

    Args:
        name: the feature, as a reader of vLLM's documentation knows it.
        applies: tells from a finished VllmConfig whether the feature is on.
        change: what to do about it, an imperative.
        by_machine: depends on the installation alone; `applies` ignores its argument.
    """

    name: str
    applies: Callable[[Any], bool]
    change: str
    by_machine: bool = False
