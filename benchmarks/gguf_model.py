"""Writes a GGUF file of the Llama architecture as a model folder of Transformers.

GGUF stores queries and keys with their rotary pairs side by side, and the tokenizer as
lists of tokens and merges. What SmolLM2's file needs is known; the rest is refused.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)
"""What `convert` writes."""
ARCHITECTURE, PRE_TOKENIZER = "llama", "smollm"
CONTROL_TOKEN = 3
EMBEDDING, OUTPUT = "token_embd.weight", "output.weight"
OUTER_NAMES = {
    EMBEDDING: "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    OUTPUT: "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Name in a block of the GGUF file -> name in a layer of the model folder."""

Fields = Mapping[str, Any]


def convert(source: Path, folder: Path) -> None:
    """Write the model folder of a GGUF file, its weights in bfloat16.

    Raises:
        ValueError: another architecture, another tokenizer, or an unknown tensor.
    """
    reader = GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    expect(fields, "general.architecture", ARCHITECTURE)
    expect(fields, "tokenizer.ggml.pre", PRE_TOKENIZER)
    tensors = {
        tensor.name: dequantize(tensor.data, tensor.tensor_type)
        for tensor in reader.tensors
    }
    config = model_config(fields, is_tied=OUTPUT not in tensors)
    tokens = {name: config[name] for name in config if name.endswith("_token_id")}
    save_file(weights(tensors, config), folder / "model.safetensors", {"format": "pt"})
    build_tokenizer(fields).save(str(folder / "tokenizer.json"))
    for name, values in {
        "config.json": config,
        "generation_config.json": tokens,
        "tokenizer_config.json": tokenizer_config(fields),
    }.items():
        (folder / name).write_text(json.dumps(values, indent=2) + "\n")


def expect(fields: Fields, name: str, wanted: str) -> None:
    """Raise ValueError unless a field of the file has the wanted value."""
    if fields.get(name) != wanted:
        raise ValueError(f"{name}: got {fields.get(name)!r}, expected {wanted!r}")


def weights(
    tensors: Mapping[str, np.ndarray], config: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """Return the parameters of the model folder, bfloat16.

    Args:
        tensors: name in the GGUF file -> weights, [out, in] or [size], float32.

    Raises:
        ValueError: a tensor has no place in the model folder.
    """
    heads = {
        "attn_q": config["num_attention_heads"],
        "attn_k": config["num_key_value_heads"],
    }
    found = {}
    for name, tensor in tensors.items():
        block, _, rest = name.removeprefix("blk.").partition(".")
        part = rest.removesuffix(".weight")
        if name in OUTER_NAMES:
            target = OUTER_NAMES[name]
        elif block.isdecimal() and rest.endswith(".weight") and part in LAYER_NAMES:
            target = f"model.layers.{block}.{LAYER_NAMES[part]}.weight"
            if part in heads:
                tensor = halves_of_pairs(tensor, heads[part])
        else:
            raise ValueError(f"tensors: {name!r} has no place in a Llama model")
        values = torch.from_numpy(np.array(tensor, dtype=np.float32, order="C"))
        found[target] = values.to(torch.bfloat16)
    return found


def halves_of_pairs(projection: np.ndarray, heads: int) -> np.ndarray:
    """Return a projection whose rotary pairs lie half a head apart, not side by side.

    Args:
        projection: [heads * size, in], rows 2 i and 2 i + 1 of a head are a pair.

    Returns:
        [heads * size, in], rows i and i + size / 2 of a head are a pair.
    """
    rows, columns = projection.shape
    pairs = projection.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def model_config(fields: Fields, is_tied: bool) -> dict[str, Any]:
    """Return the content of `config.json`."""

    def of_model(name: str) -> Any:
        return fields[f"{ARCHITECTURE}.{name}"]

    hidden, heads = of_model("embedding_length"), of_model("attention.head_count")
    # The file has float32, in which 1e-5 is 9.999999747e-06.
    epsilon = float(f"{of_model('attention.layer_norm_rms_epsilon'):.6g}")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": of_model("feed_forward_length"),
        "num_hidden_layers": of_model("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": of_model("attention.head_count_kv"),
        "head_dim": hidden // heads,
        "max_position_embeddings": of_model("context_length"),
        "rms_norm_eps": epsilon,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": of_model("rope.freq_base"),
        },
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "tie_word_embeddings": is_tied,
        "hidden_act": "silu",
        "attention_bias": False,
        "dtype": "bfloat16",
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }


def build_tokenizer(fields: Fields) -> Tokenizer:
    """Return the byte-level BPE tokenizer, which reads digits one by one."""
    tokens = fields["tokenizer.ggml.tokens"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = [tuple(pair.split(" ")) for pair in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == CONTROL_TOKEN
        ]
    )
    return tokenizer


def tokenizer_config(fields: Fields) -> dict[str, Any]:
    """Return the content of `tokenizer_config.json`, the chat template included."""
    tokens = fields["tokenizer.ggml.tokens"]
    named = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{
            f"{name}_token": tokens[fields[f"tokenizer.ggml.{word}_token_id"]]
            for name, word in named.items()
        },
        "chat_template": fields["tokenizer.chat_template"],
        "model_max_length": fields[f"{ARCHITECTURE}.context_length"],
        "clean_up_tokenization_spaces": False,
    }
