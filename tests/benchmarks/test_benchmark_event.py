"""The timed event is one of a real worker; its figures are medians of paired rounds."""

import pytest
import torch

from benchmarks.gpu.kernel_checks import forced
from benchmarks.kernels import bench_event as bench

TOKENS = 256


def caches_after_events(which: str, policy: str) -> torch.Tensor:
    """Return keys and values [L, B, H, N, 2D] after two events of one request."""
    shape = bench.LAYERS, bench.BLOCKS, bench.HEADS, bench.PAGE, 2 * bench.SIZE
    caches = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    worker = bench.make_worker(policy, TOKENS, caches)
    with forced(which):
        for ordinal in (0, 1):
            event = bench.make_event(policy, TOKENS, ordinal)
            worker.compactor.run((event,))
    row = worker.requests.row_of["a"]
    kept = int(worker.requests.num_global[row]) * bench.PAGE + bench.RECENT
    assert kept == TOKENS - bench.INTERVAL
    return caches


@pytest.mark.parametrize("policy", ["ams-tova", "ams-expected"])
def test_contestants_keep_the_same_tokens(policy: str) -> None:
    in_cpp, want = (
        caches_after_events(which, policy) for which in ("cpu", "reference")
    )
    assert torch.equal(in_cpp, want)


def test_figures_are_of_rounds() -> None:
    def rounds(*times: float) -> list[dict[str, float]]:
        return [dict.fromkeys(bench.UNITS, each) for each in times]

    found = {bench.OURS: rounds(2.0, 4.0, 3.0), "reference": rounds(8.0, 8.0, 9.0)}
    record = bench.summary(found)
    assert record[bench.OURS]["milliseconds"] == 3
    ratio = record["ratios"]["reference / cpp"]["cpu_milliseconds"]
    assert ratio["median"] == 3 and 2 <= ratio["low"] <= ratio["high"] <= 4
