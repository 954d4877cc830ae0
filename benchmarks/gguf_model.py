"""Writes a GGUF file of SmolLM2 or Qwen2 as a model folder of Transformers.

GGUF stores the tokenizer as lists of tokens and merges, and the queries and keys of
Llama's architecture with their rotary pairs side by side. What the files of these two
families need is known; the rest is refused.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from safetensors.torch import save_file
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
)

FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)
"""What `convert` writes."""
CONTROL_TOKEN, USER_TOKEN = 3, 4
"""Types of tokens that text is never split across; users see the second in text."""
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
QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""What Qwen2's tokenizer takes as a word (technical report, section 2.1)."""

Fields = Mapping[str, Any]


@dataclass(frozen=True)
class Family:
    """What models of one architecture have in common.

    Attributes:
        model_class: of Transformers and vLLM.
        pre_tokenizer: its name in GGUF.
        has_pairs: rotary pairs stand side by side in the file.
        own_config: of `config.json`.
    """

    model_class: str
    pre_tokenizer: str
    has_pairs: bool
    own_config: Mapping[str, Any]


FAMILIES = {
    "llama": Family("LlamaForCausalLM", "smollm", True, {"attention_bias": False}),
    "qwen2": Family("Qwen2ForCausalLM", "qwen2", False, {"use_sliding_window": False}),
}
"""By architecture."""


def convert(source: Path, folder: Path) -> None:
    """Write the model folder of a GGUF file, its weights in bfloat16.

    Raises:
        ValueError: another architecture, another tokenizer, or an unknown tensor.
    """
    reader = GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    architecture = fields.get("general.architecture")
    if architecture not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise ValueError(
            f"general.architecture: got {architecture!r}, expected {known}"
        )
    family = FAMILIES[architecture]
    expect(fields, "tokenizer.ggml.pre", family.pre_tokenizer)
    tensors = {
        tensor.name: dequantize(tensor.data, tensor.tensor_type)
        for tensor in reader.tensors
    }
    config = model_config(fields, is_tied=OUTPUT not in tensors)
    tokens = {name: config[name] for name in config if name.endswith("_token_id")}
    parameters = weights(tensors, config, family)
    save_file(parameters, folder / "model.safetensors", {"format": "pt"})
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
    tensors: Mapping[str, np.ndarray], config: Mapping[str, Any], family: Family
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
        part, _, kind = rest.partition(".")
        if name in OUTER_NAMES:
            target = OUTER_NAMES[name]
        elif block.isdecimal() and kind in ("weight", "bias") and part in LAYER_NAMES:
            target = f"model.layers.{block}.{LAYER_NAMES[part]}.{kind}"
            if family.has_pairs and part in heads:
                tensor = halves_of_pairs(tensor, heads[part])
        else:
            raise ValueError(
                f"tensors: {name!r} has no place in a {family.model_class}"
            )
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
    architecture = fields["general.architecture"]
    family = FAMILIES[architecture]

    def of_model(name: str) -> Any:
        return fields[f"{architecture}.{name}"]

    hidden, heads = of_model("embedding_length"), of_model("attention.head_count")
    # The file has float32, in which 1e-5 is 9.999999747e-06.
    epsilon = float(f"{of_model('attention.layer_norm_rms_epsilon'):.6g}")
    return {
        "architectures": [family.model_class],
        "model_type": architecture,
        **family.own_config,
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
        "dtype": "bfloat16",
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }


def build_tokenizer(fields: Fields) -> Tokenizer:
    """Return the byte-level BPE tokenizer, which reads digits one by one.

    Qwen2's splits as its report says: contractions, words with at most one sign before
    them, digits, signs with the line ends behind them, and white space.
    """
    tokens = fields["tokenizer.ggml.tokens"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = [tuple(pair.split(" ")) for pair in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    is_qwen = fields["general.architecture"] == "qwen2"
    if is_qwen:
        tokenizer.normalizer = normalizers.NFC()
        first = pre_tokenizers.Split(Regex(QWEN_WORDS), "isolated")
    else:
        first = pre_tokenizers.Digits(individual_digits=True)
    rest = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not is_qwen)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([first, rest])
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == CONTROL_TOKEN
        ]
    )
    tokenizer.add_tokens(
        [
            AddedToken(token, special=False, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == USER_TOKEN
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
            f"{name}_token": tokens[fields[key]]
            for name, word in named.items()
            if (key := f"tokenizer.ggml.{word}_token_id") in fields
        },
        "chat_template": fields["tokenizer.chat_template"],
        "model_max_length": fields[f"{fields['general.architecture']}.context_length"],
        "clean_up_tokenization_spaces": False,
    }
