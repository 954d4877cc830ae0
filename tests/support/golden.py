"""Golden data: what other implementations computed, see tests/golden/README.md."""

from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parents[1] / "golden"
Golden = dict[str, np.ndarray]


def read_golden(name: str) -> Golden:
    """Return the arrays of a file of tests/golden, by name."""
    with np.load(FOLDER / f"{name}.npz", allow_pickle=False) as data:
        return dict(data)


def params(golden: Golden, kind: str, case: int) -> dict[str, float]:
    """Return the parameters of a case, by name, from `KIND_cols` and `KIND_params`."""
    start = f"{kind}_" if kind else ""
    names, values = golden[f"{start}cols"], golden[f"{start}params"][case]
    return dict(zip(map(str, names), map(float, values), strict=True))
