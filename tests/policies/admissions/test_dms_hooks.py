"""Channels that are borrowed are written down and hidden, in modules of either kind."""

import pytest
import torch
from torch import nn

from vllm_kvpolicy.policies.admissions.dms.model import DmsRule
from vllm_kvpolicy.policies.admissions.dms.policy import attach_borrowed

HEADS, GROUP, SIZE, WIDTH, TOKENS = 2, 3, 8, 24, 5
CHANNEL = 2


class Projection(nn.Linear):
    """Returns a bias beside the output, as vLLM's do."""

    def forward(self, rows):
        return super().forward(rows), None


class Attention(nn.Module):
    """A module around an attention layer that returns its query."""

    def __init__(self, has_norm):
        super().__init__()
        self.head_dim = SIZE
        self.qkv_proj = Projection(WIDTH, (HEADS * GROUP + 2 * HEADS) * SIZE)
        self.attn = Identity()
        if has_norm:
            self.q_norm = nn.LayerNorm(SIZE)

    def forward(self, rows):
        """Return the query that attention sees, and the rest of the projection."""
        projected, _ = self.qkv_proj(rows)
        query, rest = projected.split([HEADS * GROUP * SIZE, 2 * HEADS * SIZE], dim=-1)
        if hasattr(self, "q_norm"):
            query = self.q_norm(query.view(TOKENS, -1, SIZE)).view(query.shape)
        # In place of a rotation: channels leak into their neighbours.
        query = query + query.roll(1, -1)
        return self.attn(query, rest), rest


class Identity(nn.Module):
    def forward(self, query, rest):
        return query


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("zero_after_rope", [False, True])
def test_first_query_head_of_each_group(has_norm, zero_after_rope):
    torch.manual_seed(0)
    module, rows = Attention(has_norm), torch.randn(TOKENS, WIDTH)
    with torch.no_grad():
        projected = module.qkv_proj(rows)[0]
        query = projected[:, : HEADS * GROUP * SIZE].view(TOKENS, -1, SIZE)
        query = module.q_norm(query) if has_norm else query
        rest = projected[:, HEADS * GROUP * SIZE :]
        logits = torch.full((TOKENS + 3, HEADS), 7.0)
        rule = DmsRule(channel=CHANNEL, zero_after_rope=zero_after_rope)
        attach_borrowed(module, rule, logits, HEADS * GROUP, torch.float32)
        seen, others = module(rows)
    wanted = query.clone()
    wanted[:, ::GROUP, CHANNEL] = 0
    wanted = wanted.flatten(1)
    wanted = (wanted + wanted.roll(1, -1)).view(TOKENS, -1, SIZE)
    assert wanted[:, ::GROUP, CHANNEL].abs().min() > 0
    if zero_after_rope:
        wanted[:, ::GROUP, CHANNEL] = 0
    torch.testing.assert_close(logits[:TOKENS], query[:, ::GROUP, CHANNEL])
    assert (logits[TOKENS:] == 7).all()
    torch.testing.assert_close(seen, wanted.flatten(1), rtol=0, atol=0)
    torch.testing.assert_close(others, rest, rtol=0, atol=0)


def test_other_modules_are_refused():
    with pytest.raises(ValueError, match="expected qkv_proj and attn"):
        attach_borrowed(nn.Linear(2, 2), DmsRule(), torch.zeros(1, 1), 2, torch.float32)
