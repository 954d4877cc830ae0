"""What tokens decide, written in one launch, against the reference."""

import pytest
import torch

from vllm_kvpolicy.kernels.visibility import Decisions, write_until, write_until_ref

PAGE, BLOCKS = 4, 50


def slots(position: torch.Tensor, blocks: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Return the slots in head 0 of a request's positions; 0 before its first token."""
    place = position.clamp_min(0)
    found = blocks[place // PAGE] * num_heads * PAGE + place % PAGE
    return torch.where(position < 0, 0, found)


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("kind", ["bits", "logits", "one for all heads"])
@pytest.mark.parametrize("num_heads", [1, 3, 8])
def test_exact(shift: int, kind: str, num_heads: int) -> None:
    """Prompts, chunks, decode steps and padding; other slots keep what they hold."""
    generator = torch.Generator().manual_seed(num_heads)
    spans = [(0, 37), (5, 6), (17, 18), (16, 17), (30, 39)]  # tokens computed
    blocks = 1 + torch.randperm(BLOCKS, generator=generator)
    own, governed, position = [], [], []
    for number, (start, end) in enumerate(spans):
        places, mine = torch.arange(start, end), blocks[number * 10 :]
        own.append(slots(places, mine, num_heads))
        governed.append(slots(places - shift, mine, num_heads))
        position.append(places)
    padding = torch.zeros(5, dtype=torch.int64)
    own, governed, position = (
        torch.cat((*part, padding)) for part in (own, governed, position)
    )
    num_tokens = len(own) - 2  # tensors of the largest step are longer
    shape = num_tokens, num_heads
    values = torch.randn(shape, generator=generator).round(decimals=1)
    values[3, 0] = torch.nan
    if kind == "bits":
        decisions = Decisions(values > 0)
    else:
        values = values if kind == "logits" else values[:, :1].expand(shape)
        decisions = Decisions(values, 10.0, 5.0)
    heads = torch.arange(num_heads) * PAGE
    per_layer = (BLOCKS + 1) * num_heads * PAGE
    given = decisions, own, governed, position, heads, per_layer, 7, shift, 2
    both = torch.full((2, 2 * per_layer), -3, dtype=torch.int32)
    write_until(both[0], *given)
    write_until_ref(both[1], *given)
    both[:, per_layer + heads] = 0  # of nobody
    assert torch.equal(*both)
    assert (both[0, :per_layer] == -3).all()
    assert len(both[0].unique()) > 5


def test_no_token() -> None:
    until, none = torch.zeros(8, dtype=torch.int32), torch.zeros(0, dtype=torch.int64)
    write_until(
        until, Decisions(torch.zeros(0, 2)), *[none] * 3, torch.arange(2), 0, 5, 1, 1
    )
    assert not until.any()
