"""Write gates of tokens on pages, against the same gates token by token."""

import torch

from vllm_kvpolicy.kernels.paged import PagedTokens
from vllm_kvpolicy.kernels.rope import Rope
from vllm_kvpolicy.kernels.wgkv_gate import GateWeights, gate, paged_gates

SIZE, UNITS, PAGE = 8, 12, 4


def test_each_token_has_the_gate_of_its_key_and_position() -> None:
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    pools = [drawn(60, PAGE, SIZE) for _ in range(2)]
    pages = torch.randperm(60, generator=generator).view(2, 2, 3, 5)  # E, L, H, C
    token = torch.randint(0, 20, (2, 2, 3, 7), generator=generator)
    positions = torch.randint(0, 9000, token.shape, generator=generator)
    weights = GateWeights(
        drawn(2, SIZE),
        drawn(2, SIZE),
        drawn(2, 3, UNITS, 2 * SIZE) * 0.3,
        drawn(2, 3, UNITS),
        drawn(2, 3, UNITS) * 0.3,
        drawn(2, 3),
    )
    rope = Rope.from_theta(1e4, SIZE)
    keys = PagedTokens(pools, pages, 20)
    got = paged_gates(keys, token, positions, rope, weights)
    assert got.shape == token.shape and got.std() > 0.1
    for event, layer, head, number in torch.cartesian_prod(
        *(torch.arange(size) for size in token.shape)
    ).tolist():
        at = event, layer, head
        place = token[*at, number]
        after = pools[layer][pages[*at, place // PAGE], place % PAGE]
        before = rope.unrotate(after, positions[*at, number])
        own = weights.layer(layer)
        mine = {
            name: t if name.endswith("norm") else t[head : head + 1]
            for name, t in own.tensors().items()
        }
        want = gate(before[None, None], after[None, None], GateWeights(**mine))
        torch.testing.assert_close(got[*at, number], want[0, 0])
