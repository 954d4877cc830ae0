"""Random gates for tests of files and of their contents."""

import torch

from vllm_kvpolicy.kernels.wgkv_gate import GateWeights
from vllm_kvpolicy.policies.admissions.wgkv import Gates


def make_weights(
    layers: int = 3, heads: int = 2, channels: int = 8, units: int = 5
) -> GateWeights:
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(layers, *shape, generator=generator)

    return GateWeights(
        pre_norm=drawn(channels),
        post_norm=drawn(channels),
        first=drawn(heads, units, 2 * channels),
        first_bias=drawn(heads, units),
        second=drawn(heads, units),
        second_bias=drawn(heads),
    )


def make_gates(
    layers: int = 3, heads: int = 2, channels: int = 8, units: int = 5, **fields: object
) -> Gates:
    """Return gates of random weights; `fields` replace those of `Gates`."""
    weights = make_weights(layers, heads, channels, units)
    values = {"model": "a model", "flavour": "qwen3", "num_layers": layers}
    values |= {"num_kv_heads": heads, "head_dim": channels, "rope_theta": 5e5}
    values |= {"window": 64, "threshold": 0.1, "sinks": 4, "sparsity_weight": 0.16}
    values |= {"kept_fraction": 0.25, "tensors": Gates.unstacked(weights.tensors())}
    return Gates(**{**values, **fields})
