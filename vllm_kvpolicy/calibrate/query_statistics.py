"""Computes statistics of a model's queries over the tokens of a text.

Source: TriAttention (arXiv 2604.04921) and Q-Filters (arXiv 2503.02812) section 3;
https://github.com/WeianMao/triattention/blob/c3744ee6a50522a1559a577f85aef2b165a344f2/scripts/calibrate.py,
https://github.com/NathanGodey/qfilters/blob/cda5c38d3aa3f11815cf991661be80cb4f345815/make_filters.py.
Deviations: queries before RoPE are taken after the query norm of models that have one
(TriAttention's script omits the norm, its scores do not); a filter is computed from all
queries (theirs: 3000 random ones) and its sign from their mean projection, as in the
paper (the script counts signs).
"""

from typing import Protocol

import torch


class QueryStatistics(Protocol):
    """Sums queries up and returns the tensors of a calibration file."""

    def add(self, layer: int, before: torch.Tensor, after: torch.Tensor) -> None:
        """Add queries [N, Hq, D] of N tokens, before and after RoPE."""
        ...

    def result(self, num_tokens: int, num_kv_heads: int) -> dict[str, torch.Tensor]:
        """Return the tensors of the calibration file; see `Calibration.shapes`."""
        ...


class TriAttentionStatistics:
    """Mean and mean length of the queries before RoPE, per channel pair."""

    def __init__(self) -> None:
        self.queries: dict[int, torch.Tensor] = {}
        self.lengths: dict[int, torch.Tensor] = {}

    def add(self, layer: int, before: torch.Tensor, after: torch.Tensor) -> None:
        """See `QueryStatistics`."""
        query = before.double()
        length = torch.hypot(*query.chunk(2, dim=-1))
        self.queries[layer] = self.queries.get(layer, 0) + query.sum(0)
        self.lengths[layer] = self.lengths.get(layer, 0) + length.sum(0)

    def result(self, num_tokens: int, num_kv_heads: int) -> dict[str, torch.Tensor]:
        """See `QueryStatistics`."""
        real, imag = (_stacked(self.queries) / num_tokens).float().chunk(2, dim=-1)
        return {
            "query_real": real.contiguous(),
            "query_imag": imag.contiguous(),
            "query_abs": (_stacked(self.lengths) / num_tokens).float(),
        }


class QFilterStatistics:
    """Direction away from the queries after RoPE, mean over the heads of a group.

    For each query head this is the first right singular vector of all queries, with the
    sign that makes their mean projection negative.
    """

    def __init__(self) -> None:
        self.queries: dict[int, torch.Tensor] = {}
        self.products: dict[int, torch.Tensor] = {}

    def add(self, layer: int, before: torch.Tensor, after: torch.Tensor) -> None:
        """See `QueryStatistics`."""
        query = after.double().transpose(0, 1)  # [Hq, N, D]
        self.queries[layer] = self.queries.get(layer, 0) + query.sum(1)
        self.products[layer] = self.products.get(layer, 0) + query.mT @ query

    def result(self, num_tokens: int, num_kv_heads: int) -> dict[str, torch.Tensor]:
        """See `QueryStatistics`."""
        # Q's right singular vectors are the eigenvectors of Q^T Q, in reverse order.
        vectors = torch.linalg.eigh(_stacked(self.products)).eigenvectors[..., -1]
        projection = (vectors * _stacked(self.queries)).sum(-1, keepdim=True)
        away = torch.where(projection > 0, -vectors, vectors)
        filters = away.unflatten(1, (num_kv_heads, -1)).mean(2)
        return {"filters": filters.float()}


STATISTICS: dict[str, type[QueryStatistics]] = {
    "triattention": TriAttentionStatistics,
    "qfilter": QFilterStatistics,
}


def _stacked(layers: dict[int, torch.Tensor]) -> torch.Tensor:
    """Stack the layers in order, on the host."""
    return torch.stack([layers[layer].cpu() for layer in sorted(layers)])
