"""Expected Attention: score_i = (mean over group of softmax_i(z) + eps) * |v_i|,
z_i = E_w[x_wi] + Var_w[x_wi] / 2 with x_wi = mean_j R(W - w + j) q_w . k_i * scale.

R(n) turns a query n positions ahead, so w = 0..W-1 has position end - W + w and
mean_j, j = 0..N-1, spreads it over the next N positions end + j. E and Var go over the
window: z is the logarithm of the expected weight if future queries are Gaussian.

Source: Expected Attention (arXiv 2510.00636) section 3;
https://github.com/NVIDIA/kvpress/blob/main/kvpress/presses/expected_attention_press.py.
Deviations: future positions follow the newest token (theirs follow the number of
queries given); no query is dropped (theirs leaves out the first four); float32, the
average rotation and the softmax's sum in float64 (theirs is in the model dtype). As
theirs, the softmax leaves out the sinks, here the leading run of must-keep tokens, and
gives them the highest score, here of their row (theirs of all heads and requests).
"""

from functools import partial

import torch

from vllm_kvpolicy.kernels.chunks import map_pairs
from vllm_kvpolicy.kernels.paged_reductions import paged_norms
from vllm_kvpolicy.kernels.ranking import leading_run
from vllm_kvpolicy.kernels.rope import Rope
from vllm_kvpolicy.kernels.softmax import masked_softmax
from vllm_kvpolicy.kernels.window_usage import WindowUsage
from vllm_kvpolicy.policies.base import EventInputs, Needs
from vllm_kvpolicy.policies.scorers.base import BaseScorer
from vllm_kvpolicy.policies.scorers.unmeasured import fill_with_highest


class ExpectedAttentionScorer(BaseScorer):
    """Scores a token by the attention that queries like the newest will pay to it.

    Args:
        expected_window: W, queries that stand for future ones.
        n_future: N, future positions.
        covariance: add the half variance to z.
        value_norm: multiply by the length of the value.
        epsilon: eps, added to the attention before that.
    """

    def __init__(
        self,
        expected_window: int,
        n_future: int,
        covariance: bool,
        value_norm: bool,
        epsilon: float,
    ) -> None:
        self.needs = Needs(
            window_tokens=expected_window, keys=True, values=value_norm, rope=True
        )
        self.num_future = n_future
        self.covariance = covariance
        self.value_norm = value_norm
        self.epsilon = epsilon

    def score(self, inputs: EventInputs, usage: WindowUsage | None) -> torch.Tensor:
        """Score [E, L, H, T] float32."""
        size, keys = self.needs.window_tokens, inputs.given("keys")
        queries = inputs.given("queries")[..., -size:, :]
        future = turn_ahead(queries, inputs.given("rope"), self.num_future)
        step = torch.arange(size, device=keys.device)
        is_real = step >= size - inputs.end[:, None]  # False before position 0
        is_real = is_real[:, None, :, None].expand(-1, keys.shape[1], -1, -1)
        measured = inputs.valid & ~leading_run(inputs.must_keep)
        score = map_pairs(
            partial(_expected_attention, inputs.scale, self.covariance),
            2 * 4 * queries[0, 0, :, :, 0].numel() * keys.shape[3],
            future,
            is_real,
            keys,
            measured,
        )
        if self.value_norm:
            norms = paged_norms(inputs.paged("values"), inputs.lengths)
            score = (score + self.epsilon) * norms
        return fill_with_highest(score, measured)


def turn_ahead(queries: torch.Tensor, rope: Rope, num_future: int) -> torch.Tensor:
    """Average each query's rotations to the `num_future` positions after the window.

    Args:
        queries: [..., W, D] floating point, post-RoPE, consecutive, newest last.
        rope: the model's rotary embedding; its scaling is in the queries already.
        num_future: positions averaged over.

    Returns:
        [..., W, D] float32.
    """
    num_queries, device = queries.shape[-2], queries.device
    ahead = rope.angles(num_queries - torch.arange(num_queries, device=device))
    further = rope.angles(torch.arange(num_future, device=device))
    mean = torch.polar(torch.ones_like(further), further).mean(0)
    turn = (torch.polar(torch.ones_like(ahead), ahead) * mean).to(torch.complex64)
    turned = torch.complex(*queries.float().chunk(2, dim=-1)) * turn
    return torch.cat([turned.real, turned.imag], dim=-1)


def _expected_attention(
    scale: float,
    covariance: bool,
    queries: torch.Tensor,
    is_real: torch.Tensor,
    keys: torch.Tensor,
    measured: torch.Tensor,
) -> torch.Tensor:
    """Return the mean over the group of softmax(z), [n, H, T] float32.

    Args:
        scale: softmax scale.
        covariance: add the half variance to z.
        queries: [n, Hq, W, D], turned ahead.
        is_real: [n, W, 1] bool, queries that count.
        keys: [n, H, T, D].
        measured: [n, H, T] bool, tokens that share the attention.
    """
    num_heads = keys.shape[1]
    grouped = queries.unflatten(1, (num_heads, -1))  # [n, H, G, W, D]
    grouped = torch.where(is_real[:, None, None], grouped, 0.0)
    count = is_real.sum(1)[:, None, None]
    mean = grouped.sum(3) / count
    columns = keys.float().transpose(-1, -2) * scale
    logits = torch.matmul(mean, columns)  # [n, H, G, T]
    if covariance:
        centred = torch.where(is_real[:, None, None], grouped - mean[..., None, :], 0.0)
        spread = torch.matmul(centred.flatten(2, 3), columns).square()
        spread = spread.unflatten(2, grouped.shape[2:4]).sum(3) / count
        logits = logits + spread / 2
    return masked_softmax(logits, measured[:, :, None]).mean(2)
