"""What a decoding step reads of a model's weights, by its configuration.

Source: DMS (arXiv 2506.05345) appendix G, the reads of a step: n (6 d d_ff + 4 d^2 +
4 d d_kv + 4 B L d_kv) + 2 d V bytes in bfloat16, for B requests of L tokens; the paper
prints d_ff for the first d_kv. Deviations: the KV cache is counted by vLLM; heads may
have any size; reads alone, because a plan does not know a device's FLOPs.
"""

from typing import Any

GATED = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "granite")
"""Types of models whose layers have three matrices behind attention, as Llama's."""


def weight_bytes(model: Any) -> int | None:
    """Return the bytes of weights that a step reads; None where they are not known.

    Known are those of GATED, without quantisation.

    Args:
        model: vLLM's ModelConfig.
    """
    config = model.hf_text_config
    if config.model_type not in GATED or model.quantization is not None:
        return None
    size, layers = config.hidden_size, config.num_hidden_layers
    inner = config.intermediate_size
    heads = config.num_attention_heads + model.get_total_num_kv_heads()
    per_layer = 3 * size * inner + 2 * size * heads * model.get_head_size()
    numbers = layers * per_layer + size * config.vocab_size
    return numbers * model.dtype.itemsize


def step_in_words(count: int, weights: float, whole: float, own: float) -> str:
    """Return what a step of so many requests reads, as a sentence.

    Args:
        weights: bytes of weights.
        whole, own: mean bytes of KV cache of a request, with stock and with a policy.
    """
    whole, own = count * whole, count * own
    faster = (weights + whole) / (weights + own)
    sizes = [f"{part / 1e9:.2f} GB" for part in (weights, whole, own)]
    shares = [f"({part / (weights + part):.0%} of all)" for part in (whole, own)]
    return (
        f"A step of {count} reads {sizes[0]} of weights and {sizes[1]} of stock's KV "
        f"cache {shares[0]}, with the policy {sizes[2]} {shares[1]}: where reading is "
        f"all that counts, {faster:.2f} times as fast."
    )
