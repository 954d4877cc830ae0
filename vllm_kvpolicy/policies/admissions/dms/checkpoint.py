"""Model classes of checkpoints that hold DMS adapters next to the model's own weights.

The entry point registers them with vLLM under their names here. The base
model is unchanged, so without a policy they run as the model that they were made from;
`policy` reads the adapters from the same files.

Source: https://github.com/NVIDIA/Model-Optimizer/tree/a2fbac7/experimental/dms, whose
recipe writes them. Deviations: none.
"""

from collections.abc import Iterable

from torch import Tensor
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

ADAPTER = ".self_attn.dms_proj_alpha"
Weights = Iterable[tuple[str, Tensor]]


def without_adapters(weights: Weights) -> Weights:
    """Yield the names and tensors that are not an adapter's."""
    return ((name, tensor) for name, tensor in weights if ADAPTER not in name)


class LlamaForCausalLMDMS(LlamaForCausalLM):
    """Llama that skips the adapters' tensors, which `--kv-policy dms` reads."""

    def load_weights(self, weights: Weights) -> set[str]:
        return super().load_weights(without_adapters(weights))


class Qwen3ForCausalLMDMS(Qwen3ForCausalLM):
    """Qwen3 that skips the adapters' tensors, which `--kv-policy dms` reads."""

    def load_weights(self, weights: Weights) -> set[str]:
        return super().load_weights(without_adapters(weights))
