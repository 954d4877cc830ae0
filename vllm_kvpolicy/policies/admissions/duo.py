"""DuoAttention: some KV heads keep everything, the others sinks and the recent window.

Source: DuoAttention, arXiv 2410.10819, section 2; a baseline of WG-KV (arXiv
2512.17452). Deviations: tokens leave the window at events; equal heads are split in
model order, not at random.
"""

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from pydantic import Field
from torch import Tensor

from vllm_kvpolicy.policies import model_files
from vllm_kvpolicy.policies.base import EventInputs
from vllm_kvpolicy.policies.model_files import ModelShape
from vllm_kvpolicy.policies.options import BaseOptions, FilePath, Share
from vllm_kvpolicy.policies.ranks import HeadShard
from vllm_kvpolicy.policies.words import SIZED_BY_HELD, BaseAdmission

NAME = "duo pattern"
expect = partial(model_files.expect, NAME)
HEADS_FILE, CONFIG_FILE = "full_attention_heads.tsv", "config.json"
VALID = f"a folder with {HEADS_FILE} and {CONFIG_FILE}"


@dataclass(frozen=True)
class Pattern:
    """How much each head of a model profits from a full cache.

    Args:
        use: [L, H] float64 from 0 to 1.
        sinks, recent: first and newest tokens that every head keeps.
    """

    use: Tensor
    sinks: int
    recent: int
    path: str | Path

    def check_shape(self, num_layers: int, num_kv_heads: int) -> None:
        """Raise ValueError unless the pattern fits a model of this shape."""
        shape = [num_layers, num_kv_heads]
        expect(self.path, "layers and KV heads", list(self.use.shape), shape)

    def retrieving(self, sparsity: float) -> Tensor:
        """Return [L, H] bool: all heads but this share of them that profits least."""
        order = self.use.flatten().argsort(stable=True)
        keeps = torch.ones_like(order, dtype=torch.bool)
        keeps[order[: round(sparsity * len(order))]] = False  # sync-ok: on the CPU
        return keeps.view(self.use.shape)


def load(path: str | Path) -> Pattern:
    """Read a pattern, a folder as the authors publish them.

    It has `full_attention_heads.tsv`, a row of numbers from 0 to 1 for each layer, and
    `config.json` with `sink_size` and `recent_size`; see `attn_patterns` in
    https://github.com/mit-han-lab/duo-attention at 0aef1ae.

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
    counts = [len(row) for row in rows]
    if len(set(counts)) != 1:
        expect(path, "numbers per layer", counts, "the same number in each layer")
    use = torch.tensor(rows, dtype=torch.float64)
    if not bool(((use >= 0) & (use <= 1)).all()):
        ends = [use.min().item(), use.max().item()]  # sync-ok: reads a file
        expect(path, "smallest and largest value", ends, "values from 0 to 1")
    return Pattern(use, sizes["sink"], sizes["recent"], path)


class RetrievalHeads(BaseAdmission):
    """Admits every token to the heads that profit most, and none to the others."""

    summary = (
        "retrieval heads keep everything, other heads only sinks and the recent "
        "window; a baseline"
    )
    source = "DuoAttention, arXiv 2410.10819"
    fitted = True
    refuses = SIZED_BY_HELD

    class Options(BaseOptions):
        duo_pattern: FilePath = Field(
            description="folder with full_attention_heads.tsv and config.json, which "
            "say how much each head needs the full KV cache"
        )
        duo_sparsity: Share = Field(
            0.5,
            description="fraction of heads that keep only sinks and the recent window, "
            "those that need the full KV cache least",
        )

    @classmethod
    def build(cls, options: Any) -> Self:
        return cls(load(options.duo_pattern), options.duo_sparsity)

    @classmethod
    def check_start(cls, options: Any, kept: Any, vllm_config: Any) -> None:
        path = options.duo_pattern
        with model_files.errors_name("duo_pattern"):
            pattern, shape = load(path), ModelShape.of(vllm_config)
            pattern.check_shape(shape.num_layers, shape.num_kv_heads)
            sinks, recent = pattern.sinks, pattern.recent
            if kept.sink_tokens < sinks or kept.recent_tokens != recent:
                raise ValueError(
                    f"duo pattern {path}: made with {sinks} sinks, {recent} recent "
                    f"tokens, got --kv-sinks {kept.sink_tokens} --kv-recent "
                    f"{kept.recent_tokens}; set --kv-sinks {sinks} --kv-recent "
                    f"{recent}"
                )

    def __init__(self, pattern: Pattern, sparsity: float) -> None:
        self.pattern = pattern
        self.keeps = pattern.retrieving(sparsity).float()

    def check_model(self, model: ModelShape) -> None:
        self.pattern.check_shape(model.num_layers, model.num_kv_heads)

    def take_heads(self, shard: HeadShard) -> None:
        """Take the rank's heads; which ones retrieve, the whole model decides."""
        self.keeps = shard.kv_heads(self.keeps, 1)

    def gates(self, inputs: EventInputs, token: Tensor) -> Tensor:
        """Return [E, L, H, F], 1 in heads that keep everything; see `BaseAdmission`."""
        self.keeps = self.keeps.to(token.device)
        return self.keeps[..., None].expand(token.shape)
