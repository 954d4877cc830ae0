"""Merges tokens into one that gives a calibration query the same output.

With weights w = softmax of the query's logits s over the group, k' = sum w k and
v' = sum w v. What the group adds to the output keeps its direction exactly. Its LSE
falls from ln sum exp(s) to s' = sum w s, that is by the entropy of w: 0 where one token
dominates, ln M at most. A logit bias of that size makes the merge exact.

Source: Hard-KV, appendix G, theorem G.1; https://github.com/SuDIS-ZJU/HARDInfer.
Deviations: any number of tokens per group; the deficit comes back as a bias.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Merged:
    """One token per group.

    Args:
        key: [..., D] float32, linear in the group's keys: rotated keys stay rotated.
        value: [..., D] float32.
        deficit: [...] float32, nats that the group's LSE falls by; as a bias on the
            logit it gives them back.
    """

    key: torch.Tensor
    value: torch.Tensor
    deficit: torch.Tensor


def lse_merge(keys: torch.Tensor, values: torch.Tensor, logits: torch.Tensor) -> Merged:
    """Merge each group of M tokens; a pair is M = 2.

    Args:
        keys: [..., M, D] floating point.
        values: [..., M, D] floating point.
        logits: [..., M] floating point, of the calibration query, softmax scale
            included; minus infinity leaves a token out.
    """
    weight = torch.softmax(logits.double(), dim=-1)
    entropy = torch.special.entr(weight).sum(-1)
    key = torch.matmul(weight.unsqueeze(-2), keys.double()).squeeze(-2)
    value = torch.matmul(weight.unsqueeze(-2), values.double()).squeeze(-2)
    return Merged(key.float(), value.float(), entropy.float())
