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
from pydantic import Field
from torch import Tensor

from vllm_kvpolicy.kernels.chunks import map_pairs_to_many
from vllm_kvpolicy.kernels.paged_reductions import paged_norms, paged_quadratics
from vllm_kvpolicy.kernels.ranking import leading_run
from vllm_kvpolicy.kernels.rope import Rope
from vllm_kvpolicy.kernels.softmax import masked_softmax
from vllm_kvpolicy.kernels.window_usage import WindowUsage
from vllm_kvpolicy.policies.base import EventInputs, Needs
from vllm_kvpolicy.policies.options import BaseOptions, Queries
from vllm_kvpolicy.policies.scorers._windows import fill_with_highest
from vllm_kvpolicy.policies.words import BaseScorer


class ExpectedAttentionScorer(BaseScorer):
    """Scores a token by the attention that queries like the newest will pay to it.

    Of the options, `expected_window` is W, `n_future` N, `epsilon` eps, and
    `covariance` adds the half variance to z.
    """

    summary = "attention expected from future queries, times the value's norm"
    source = "Expected Attention, arXiv 2510.00636"
    query_window = "expected_window"
    weighs_itself = True
    rotates = True
    needs = Needs(keys=True, rope=True)

    class Options(BaseOptions):
        expected_window: Queries = Field(
            128,
            description="number of newest queries from which future queries are "
            "estimated",
        )
        n_future: int = Field(
            512,
            ge=1,
            le=65536,
            description="number of future positions to average over",
        )
        covariance: bool = Field(
            True, description="include the covariance of the queries"
        )
        value_norm: bool = Field(
            True, description="multiply the attention by the norm of the value"
        )
        epsilon: float = Field(
            1e-2,
            ge=0,
            le=1_000_000,
            description="constant added to each token's expected attention",
        )

    def __init__(self, options: BaseOptions) -> None:
        super().__init__(options)
        self.needs |= Needs(values=self.options.value_norm)

    def score(self, inputs: EventInputs, usage: WindowUsage | None) -> Tensor:
        size, scale = self.needs.window_tokens, inputs.scale
        queries = inputs.given("queries")[..., -size:, :]
        num_real = inputs.end.clamp(max=size)[:, None].expand(queries.shape[:2])
        rope = inputs.given("rope")
        kind = rope.of_layer
        if kind is None:
            kind = num_real.new_zeros(queries.shape[1])
        cos, sin = turn_ahead(rope, size, self.options.n_future, queries.device)
        turn = cos * scale, sin * scale, rope.partners
        mean, spread = map_pairs_to_many(
            partial(_moments, turn, self.options.covariance),
            3 * 4 * queries[0, 0].numel(),
            queries,
            num_real,
            kind.expand(queries.shape[:2]),
        )
        keys, lengths = inputs.paged("keys"), inputs.lengths
        logits = paged_quadratics(keys, lengths, mean, spread)
        measured = inputs.valid & ~leading_run(inputs.must_keep)
        grouped = logits.unflatten(2, (measured.shape[2], -1))  # [E, L, H, G, T]
        score = masked_softmax(grouped, measured[:, :, :, None]).mean(3)
        if self.options.value_norm:
            norms = paged_norms(inputs.paged("values"), inputs.lengths)
            score = (score + self.options.epsilon) * norms
        return fill_with_highest(score, measured)


def turn_ahead(
    rope: Rope, num_queries: int, num_future: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the average rotation of each query to positions after the window.

    Args:
        rope: the model's rotary embedding; its scaling is in the queries already.
        num_queries: W, queries of the window; they are consecutive, the newest is last.
        num_future: N, positions averaged over.

    Returns:
        [K, W, D] float32 each, by which each channel and the other one of its pair are
        multiplied.
    """
    frequency = rope.inv_freq.view(-1, 1, rope.inv_freq.shape[-1])
    ahead = torch.arange(num_queries, 0, -1, device=device, dtype=torch.float64)
    angle = (ahead[:, None] + (num_future - 1) / 2) * frequency  # of the N's middle
    half = frequency / 2
    length = (num_future * half).sin() / (num_future * half.sin())
    length = torch.where(frequency == 0, 1.0, length)
    cos, sin = angle.cos() * length, angle.sin() * length
    return rope.by_channel(cos, cos).float(), rope.by_channel(-sin, sin).float()


def _moments(
    turn: tuple[Tensor, Tensor, Tensor | None],
    covariance: bool,
    queries: Tensor,
    num_real: Tensor,
    kind: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return mean [n, Hq, D] and half the covariance [n, Hq, D, D] of turned queries.

    Args:
        turn: see `turn_ahead`, and `Rope.partners`.
        covariance: zeros in its place if False.
        queries: [n, Hq, W, D], newest last.
        num_real: [n] int64, newest queries that count.
        kind: [n] int64, the kind of layer.
    """
    window, (cos, sin, partners) = queries.shape[2], turn
    step = torch.arange(window, device=queries.device)
    is_old = (step < window - num_real[:, None])[:, None, :, None]
    given = queries.float().masked_fill(is_old, 0.0)
    if partners is None:
        other = given.roll(given.shape[-1] // 2, -1)
    else:
        other = given.gather(-1, partners[kind][:, None, None].expand(given.shape))
    turned = given.mul_(cos[kind][:, None]).addcmul_(other, sin[kind][:, None])
    mean = turned.sum(2) / num_real[:, None, None]
    if not covariance:
        return mean, mean.new_zeros((*mean.shape, mean.shape[-1]))
    centred = turned.sub_(mean[:, :, None]).masked_fill_(is_old, 0.0)
    spread = centred.transpose(2, 3) @ centred
    return mean, spread.div_(2 * num_real[:, None, None, None])
