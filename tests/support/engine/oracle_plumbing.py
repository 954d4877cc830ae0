"""The plumbing oracle: any policy, fed by the reference decoder instead of the server.

At every event the policy decides over dense keys, values and queries of the reference,
restricted to the tokens that the server held; what the server selected must agree. So
the server's own inputs are checked (pages, lengths, windows, positions, what it
remembers of survivors); the policies have references of their own in tests/policies.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from support.engine.oracle_replay import Mismatch, activations
from support.engine.oracle_selection import GAP, Report, check_record
from support.engine.reference_decoder import Activations, ReferenceDecoder
from vllm_kvpolicy.config import KVPolicyConfig
from vllm_kvpolicy.kernels.rope import Rope
from vllm_kvpolicy.policies.base import Decision, EventInputs, Policy
from vllm_kvpolicy.policies.compose import build
from vllm_kvpolicy.policies.scorers._signals import TokenSignal


@dataclass
class Reference:
    """Decides as a policy should, for one request.

    Args:
        seen: the request's activations under the server's survivors.
        memory: what the policy remembers, by name, [L, H, positions].
    """

    decoder: ReferenceDecoder
    policy: Policy
    seen: Activations
    memory: dict[str, torch.Tensor] = field(default_factory=dict)

    def decide(self, event: Any) -> Decision:
        """Decide at an event, over the tokens that the server held."""
        decision = self.policy.decide(self._inputs(event), event.budget)
        held = torch.tensor(event.held).long()
        for name, values in decision.memory.items():
            kept = torch.zeros(*held.shape[:2], len(self.seen.logits) + 1)
            where = torch.where(held < 0, kept.shape[-1] - 1, held)
            self.memory[name] = kept.scatter(-1, where, values[0])
        return decision

    def _inputs(self, event: Any) -> EventInputs:
        held = torch.tensor(event.held).long()
        lengths, valid = (held >= 0).sum(-1), held >= 0
        at = held.clamp_min(0)
        size = self.decoder.head_dim
        must = (held < event.sinks) | (held >= event.frontier)
        window = max(self.policy.needs.window_tokens, 1)
        newest = slice(event.position - window, event.position)

        def tokens(dense: torch.Tensor) -> torch.Tensor:
            return dense.gather(2, at[..., None].expand(-1, -1, -1, size))[None]

        zeros = torch.zeros(*held.shape)
        memory = {
            name: self.memory[name].gather(-1, at)[None] * valid
            if name in self.memory
            else zeros[None]
            for name in self.policy.needs.memory
        }
        return EventInputs(
            lengths=lengths[None],
            must_keep=(must & valid)[None],
            end=torch.tensor([event.position]),
            scale=self.decoder.scale,
            keys=tokens(self.seen.keys),
            values=tokens(self.seen.values),
            queries=self.seen.queries[None, :, :, newest],
            positions=at[None],
            rope=Rope.from_theta(self.decoder.theta, size),
            memory=memory,
            signals={each: self._signal(each) for each in self.policy.needs.signals},
            prompt_lengths=torch.tensor([event.prompt]),
        )

    def _signal(self, signal: TokenSignal) -> torch.Tensor:
        """Return what every token of the request showed, [1, positions]."""
        layers = list(signal.layers(self.decoder.num_layers))
        if signal.kind == "hidden":
            steps = self.seen.hidden[layers].diff(dim=1).norm(dim=-1)
            return torch.nn.functional.pad(steps.mean(0), (1, 0))[None]
        dense = self.seen.keys if signal.kind == "key" else self.seen.values
        return dense[layers].var(-1, unbiased=True).mean((0, 1))[None]


def check_plumbing(
    decoder: ReferenceDecoder,
    result: Any,
    config: KVPolicyConfig,
    options: Mapping[str, Any],
    block_size: int,
    report: Report,
) -> None:
    """Compare every decision of a request, and what its pages were filled up with.

    Args:
        result: a `helpers.Result` with its events.
        config: the request's policy.
        block_size: N.
        report: decisions and near ties are added to it.

    Raises:
        Mismatch: a decision differs where the reference leaves no doubt, or pages are
            not full, or there are not as many as the budget says.
    """
    check_record(result, config, block_size)
    seen = activations(decoder, result)
    policy = build(config.policy, options)
    reference = Reference(decoder, policy, seen)
    for event in result.events:
        decision = reference.decide(event)
        keep = decision.keep[0].numpy()
        _check_pages(event, policy, keep, block_size, result.job.name)
        for layer in range(decoder.num_layers):
            for head in range(decoder.num_heads):
                where = f"{result.job.name} p={event.position} l={layer} h={head}"
                row = event.held[layer, head]
                size = int((row >= 0).sum())
                score = decision.score[0, layer, head, :size].double().numpy()
                keep = decision.keep[0, layer, head, :size].numpy()
                _check_head(event, layer, head, row[:size], keep, score, where, report)


def _check_head(
    event: Any,
    layer: int,
    head: int,
    held: np.ndarray,
    keep: np.ndarray,
    score: np.ndarray,
    where: str,
    report: Report,
) -> None:
    """Compare one head's selection and survivors with a policy's decision."""
    survivors = event.survivors_of(layer, head)
    is_global = held < event.frontier
    must = (held < event.sinks) & is_global
    rank = np.where(must, 0, np.where(keep, 1, 2))
    score = np.nan_to_num(score, nan=-np.inf)
    index = np.arange(len(held))
    order = [i for i in np.lexsort((-index, -score, rank)) if is_global[i]]
    places = np.full(held.max() + 1, -1)  # of what the head did not hold
    places[held] = index
    got = places[event.selected_of(layer, head)], places[survivors]
    expected = index[keep], np.array(order[: len(survivors)], dtype=int)
    tolerance = GAP * max(1.0, np.abs(score[np.isfinite(score)]).max())
    report.compare(where, held, score, expected, got, tolerance)


def _check_pages(
    event: Any, policy: Policy, keep: np.ndarray, block_size: int, name: str
) -> None:
    """Check that pages are full, and every head has the number that it should have.

    They fill the destination superblocks, or hold the choice of a dynamic policy, and
    heads share them by what the policy keeps of them below the frontier, [L, H, T].
    """
    counts = (event.survivors >= 0).sum(-1)
    is_global = (event.held >= 0) & (event.held < event.frontier)
    wanted = (keep & is_global).sum(-1)
    caps = is_global.sum(-1) // block_size
    sinks = min(event.sinks, event.frontier) - event.pinned
    floors = np.minimum(-(-sinks // block_size), caps)
    local = event.position - event.frontier
    total = -(-(event.budget - local) // block_size) * counts.size
    if policy.dynamic:
        total = min(total, max(int((-(-wanted // block_size)).sum()), 1))
    quota = page_counts(wanted, floors, caps, total, block_size)
    if (counts != quota * block_size).any():
        raise Mismatch(
            f"{name} p={event.position}: {counts.tolist()} survivors, expected "
            f"{quota.tolist()} pages of {block_size}"
        )


def page_counts(
    wanted: np.ndarray, floors: np.ndarray, caps: np.ndarray, total: int, size: int
) -> np.ndarray:
    """Share pages among heads: a token more for each, or less, until they add up.

    Args:
        wanted: [L, H] tokens that each head asks for.
        floors: [L, H] pages.
        caps: [L, H] pages, at least the floors.
        total: pages in all; the last ones go to the first heads of equal claims.
        size: tokens per page.
    """

    def pages(shift: int) -> np.ndarray:
        return np.clip((wanted + shift) // size, floors, caps)

    shift, most = -int(wanted.max()), int(caps.max()) * size
    while shift < most and pages(shift + 1).sum() <= total:
        shift += 1
    quota = pages(shift)
    claims = (pages(shift + 1) - quota).flatten()
    left = total - quota.sum()
    return quota + (claims * (claims.cumsum() <= left)).reshape(quota.shape)
