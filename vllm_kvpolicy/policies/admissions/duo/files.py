"""Reads DuoAttention patterns: how much each KV head profits from a full cache.

A pattern is a folder as the authors publish them
(https://github.com/mit-han-lab/duo-attention at 0aef1ae, `attn_patterns`):
`full_attention_heads.tsv`, a row of numbers from 0 to 1 for each layer, and
`config.json` with `sink_size` and `recent_size`.
"""

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from vllm_kvpolicy.policies import model_files

NAME = "duo pattern"
expect = partial(model_files.expect, NAME)
HEADS_FILE, CONFIG_FILE = "full_attention_heads.tsv", "config.json"
VALID = f"a folder with {HEADS_FILE} and {CONFIG_FILE}"


@dataclass(frozen=True)
class Pattern:
    """How much each head of a model profits from a full cache.

    Args:
        use: [L, H] float64 from 0 to 1.
        sinks: first tokens that every head keeps.
        recent: newest tokens that every head keeps.
        path: where it was read from, for errors.
    """

    use: torch.Tensor
    sinks: int
    recent: int
    path: str | Path

    def check_shape(self, num_layers: int, num_kv_heads: int) -> None:
        """Check that the pattern fits a model of this shape.

        Raises:
            ValueError: naming the folder and both shapes.
        """
        shape = [num_layers, num_kv_heads]
        expect(self.path, "layers and KV heads", list(self.use.shape), shape)

    def retrieving(self, sparsity: float) -> torch.Tensor:
        """Return [L, H] bool: all heads but the share `sparsity` that profits least.

        Args:
            sparsity: from 0 to 1; rounded to whole heads.
        """
        order = self.use.flatten().argsort(stable=True)
        keeps = torch.ones_like(order, dtype=torch.bool)
        keeps[order[: round(sparsity * len(order))]] = False  # sync-ok: on the CPU
        return keeps.view(self.use.shape)


def load(path: str | Path) -> Pattern:
    """Read a pattern.

    Raises:
        ValueError: naming the folder, what was found and what is expected.
    """
    folder = Path(path)
    try:
        lines = (folder / HEADS_FILE).read_text(encoding="utf-8").splitlines()
        rows = [[float(word) for word in line.split()] for line in lines if line]
        config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        sizes = {name: config[f"{name}_size"] for name in ("sink", "recent")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{NAME} {path}: got {error!r}, expected {VALID}") from None
    for name, size in sizes.items():
        if type(size) is not int or size < 0:
            expect(path, f"{name}_size", size, "an integer >= 0")
    if not rows or len({len(row) for row in rows}) != 1:
        expect(
            path,
            "numbers per layer",
            [len(row) for row in rows],
            "the same number in each layer",
        )
    use = torch.tensor(rows, dtype=torch.float64)
    if not bool(((use >= 0) & (use <= 1)).all()):
        ends = [use.min().item(), use.max().item()]  # sync-ok: reads a file
        expect(path, "smallest and largest value", ends, "values from 0 to 1")
    return Pattern(use, sizes["sink"], sizes["recent"], path)
