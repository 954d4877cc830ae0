"""Engines on FlashInfer, an extra of the package, beside stock vLLM on the same."""

from dataclasses import replace
from typing import Any

from benchmarks.gpu.check import engines
from support.attention.oracles import missing


def check_engines(checks: Any) -> None:
    """Run engines on FLASHINFER, under policies whose heads hold equally much."""
    if reason := missing("flashinfer"):
        with checks.case("engines") as notes:
            notes.append(f"NOT RUN: {reason}")
        return
    where = engines.on_gpu("FLASHINFER")
    equal = [name for name in where.policies if not engines.is_ragged(name)]
    where = replace(where, policies=equal)
    stock = engines.check_stock(checks, where)
    engines.check_movers(checks, where, stock, ("identity", "holes"))
    engines.check_infinite(checks, where, stock)
    engines.check_policies(checks, where)
