"""Writes a random Qwen3 model folder, small enough to load in a second."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

SPECIAL_TOKENS = ("<pad>", "<eos>", "<unk>")
CHARACTERS = "\n" + "".join(chr(code) for code in range(32, 127))
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


def make_tiny_model(
    path: Path | str,
    layers: int = 2,
    hidden: int = 64,
    query_heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    max_positions: int = 4096,
    seed: int = 0,
) -> Path:
    """Write config, random float32 weights and a one-token-per-character tokenizer.

    Attention is made sharp (query and key norms of 1.5) and the output embedding is not
    tied, so that greedy output depends on what is in the KV cache.

    Args:
        path: folder to write; made if it is not there.
        query_heads: query heads, a multiple of `kv_heads`.
        head_dim: width of a head; the CPU attention kernel knows 32, 64, 80, ...
        max_positions: longest context, in tokens.
    """
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = [*SPECIAL_TOKENS, *CHARACTERS]
    config = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    config |= {"vocab_size": len(vocabulary), "hidden_size": hidden}
    config |= {"intermediate_size": 2 * hidden, "num_hidden_layers": layers}
    config |= {"num_attention_heads": query_heads, "num_key_value_heads": kv_heads}
    config |= {"head_dim": head_dim, "max_position_embeddings": max_positions}
    config |= {"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu"}
    config |= {"attention_bias": False, "tie_word_embeddings": False, "pad_token_id": 0}
    config |= {"bos_token_id": None, "eos_token_id": 1, "torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 1}))
    save_file(_random_weights(config, seed), folder / "model.safetensors")
    write_tokenizer(folder, vocabulary, max_positions)
    return folder


def _random_weights(config: dict, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]

    def linear(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * columns**-0.5

    def norm(size: int, value: float = 1.0) -> torch.Tensor:
        return torch.full((size,), value)

    weights = {
        "model.embed_tokens.weight": torch.randn(
            config["vocab_size"], hidden, generator=generator
        ),
        "model.norm.weight": norm(hidden),
        "lm_head.weight": linear(config["vocab_size"], hidden) * 4,
    }
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        weights |= {
            prefix + "input_layernorm.weight": norm(hidden),
            prefix + "post_attention_layernorm.weight": norm(hidden),
            prefix + "self_attn.q_proj.weight": linear(queries, hidden),
            prefix + "self_attn.k_proj.weight": linear(keys, hidden),
            prefix + "self_attn.v_proj.weight": linear(keys, hidden),
            prefix + "self_attn.o_proj.weight": linear(hidden, queries),
            prefix + "self_attn.q_norm.weight": norm(config["head_dim"], 1.5),
            prefix + "self_attn.k_norm.weight": norm(config["head_dim"], 1.5),
            prefix + "mlp.gate_proj.weight": linear(inner, hidden),
            prefix + "mlp.up_proj.weight": linear(inner, hidden),
            prefix + "mlp.down_proj.weight": linear(hidden, inner),
        }
    return weights


def write_tokenizer(folder: Path, vocabulary: list[str], max_positions: int) -> None:
    """Write a tokenizer that maps each character to one token, with a chat template."""
    ids = {token: index for index, token in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>"}
    settings |= {"eos_token": "<eos>", "unk_token": "<unk>"}
    settings |= {"model_max_length": max_positions}
    settings |= {"clean_up_tokenization_spaces": False, "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
