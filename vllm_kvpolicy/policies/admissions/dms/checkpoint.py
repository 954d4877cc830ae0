"""Model classes of checkpoints that hold DMS adapters next to the model's own weights.

The entry point registers them with vLLM under the names in the catalogue. The base
model is unchanged, so without a policy they run as the model that they were made from;
`policy` reads the adapters from the same files.

Source: https://github.com/NVIDIA/Model-Optimizer/tree/a2fbac7/experimental/dms, whose
recipe writes them. Deviations: none.
"""

from collections.abc import Iterable

import torch
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

ADAPTER = ".self_attn.dms_proj_alpha"


class Qwen3ForCausalLMDMS(Qwen3ForCausalLM):
    """Qwen3 that skips the adapters' tensors, which `--kv-policy dms` reads."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load all but the adapters; returns the names of what was loaded."""
        own = ((name, tensor) for name, tensor in weights if ADAPTER not in name)
        return super().load_weights(own)
