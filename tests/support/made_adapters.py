"""Random adapters of DMS for tests of files and of their contents."""

import torch

from vllm_kvpolicy.policies.admissions.dms.model import DmsAdapter


def make_adapter(
    layers: int = 3, heads: int = 2, hidden: int = 8, **fields: object
) -> DmsAdapter:
    """Return an adapter of random weights; `fields` replace those of `DmsAdapter`."""
    generator = torch.Generator().manual_seed(1)
    weights = {
        "norm": torch.randn(layers, hidden, generator=generator),
        "projection": torch.randn(layers, heads, hidden, generator=generator),
    }
    values = {"model": "a model", "flavour": "qwen3", "num_layers": layers}
    values |= {"num_kv_heads": heads, "hidden_size": hidden, "window": 64}
    values |= {"target_cr": 4.0, "kept_fraction": 0.25}
    values |= {"tensors": DmsAdapter.unstacked(weights), "alpha_scale": 50.0}
    values |= {"alpha_offset": 2.5}
    return DmsAdapter(**{**values, **fields})
