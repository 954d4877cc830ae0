"""Lets engines on a CPU schedule asynchronously, which vLLM's platform forbids.

The next step is then scheduled and run before the scheduler hears the tokens of the
last one, as on a GPU; only streams and events stand still.
"""

from contextlib import nullcontext
from typing import Any

import pytest
import torch


class Standstill:
    """A stream or an event of a device without either."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, *_: Any) -> None:
        """Do nothing."""

    synchronize = wait_stream = record


def allow_async_scheduling(patch: pytest.MonkeyPatch) -> None:
    """Keep what a configuration says about asynchronous scheduling, on by default."""
    import vllm.v1.worker.cpu.shm  # noqa: F401  vLLM's own streams stay when we undo
    from vllm.platforms import current_platform

    platform = type(current_platform)
    stock = platform.check_and_update_config

    def checked(config: Any) -> None:
        wanted = config.scheduler_config.async_scheduling
        stock(config)
        config.scheduler_config.async_scheduling = wanted

    patch.setattr(platform, "check_and_update_config", staticmethod(checked))
    patch.setattr(torch.cuda, "Event", Standstill)
    patch.setattr(torch.cuda, "Stream", Standstill)
    patch.setattr(torch.cuda, "current_stream", Standstill)
    patch.setattr(torch.cuda, "stream", nullcontext)
