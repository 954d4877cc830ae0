"""Turns off an observer that fails, and says so, so that serving goes on."""

import logging
from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

logger = logging.getLogger("vllm.kv_policy")  # without importing vLLM
P = ParamSpec("P")
Observer = TypeVar("Observer")


def only_observes(
    method: Callable[Concatenate[Observer, P], None],
) -> Callable[Concatenate[Observer, P], None]:
    """Return a method whose errors do not reach its caller.

    The first one is logged and told to the object's `on_off`, where it has one; from
    then on the methods of that object that are wrapped like this do nothing.
    """

    @wraps(method)
    def guarded(self: Any, *args: P.args, **kwargs: P.kwargs) -> None:
        if getattr(self, "is_off", False):
            return
        try:
            method(self, *args, **kwargs)
        except Exception:
            self.is_off = True
            name = type(self).__name__
            logger.exception("%s is off from here on; serving goes on", name)
            getattr(self, "on_off", _nobody)()

    return guarded


def _nobody() -> None:
    """Hear nothing."""
