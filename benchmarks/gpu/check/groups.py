"""The groups of checks; each names its function, so that a list imports no vLLM."""

import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from benchmarks.gpu.check.runner import ROOT, Checks

IEEE = {"TRITON_F32_DEFAULT": "ieee"}  # float32 in vLLM's kernels, not TF32


@dataclass(frozen=True)
class Group:
    """A group of checks that runs in its own process.

    Args:
        target: "module:function" in this package.
        arguments: of the function, before its `Checks`.
        environment: variables of the process.
    """

    target: str
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def function(self) -> Callable[..., Any]:
        """The function, imported at the first use."""
        module, _, name = self.target.partition(":")
        return getattr(import_module(f"{__package__}.{module}"), name)

    def run(self, checks: Checks) -> None:
        """Run the checks of the group."""
        self.function(*self.arguments, checks)


# The groups that take longest come first.
GROUPS = {
    "flash": Group("engines:check_backend", ("FLASH_ATTN",)),
    "triton": Group("engines:check_backend", ("TRITON_ATTN",), IEEE),
    "llama-3.1-8b": Group("engines:check_shape", ("llama-3.1-8b",)),
    "kernels": Group("kernels:check_all"),
    "pytest": Group("groups:check_pytest"),
    "oracles": Group("oracles:check_on_gpu", (), IEEE),
    "qwen3-8b": Group("engines:check_shape", ("qwen3-8b",)),
    "syncs": Group("syncs:check_on_gpu"),
    "attention": Group("attention:check_all"),
    "flashinfer": Group("flashinfer:check_engines"),
}


REHEARSAL = Group("imports:check_imports")


def check_pytest(checks: Checks) -> None:
    """Run the tests of tests/gpu, where pytest is installed."""
    with checks.case("tests/gpu") as notes:
        command = [sys.executable, "-m", "pytest", "-q", str(ROOT / "tests" / "gpu")]
        try:
            import pytest  # noqa: F401
        except ImportError:
            notes.append("NOT RUN: pytest is not installed")
            return
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        print(done.stdout, flush=True)
        notes.append(done.stdout.strip().splitlines()[-1])
        assert done.returncode == 0, "pytest failed"
