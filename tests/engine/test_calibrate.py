"""Calibration of the tiny model against statistics of a plain decoder's queries."""

import json
from pathlib import Path

import pytest
import torch

from support.engine.helpers import make_prompt
from support.engine.reference_decoder import ReferenceDecoder
from training import queries as calibrate
from training.__main__ import main
from vllm_kvpolicy.policies.calibration import Calibration, load

TOKENS, PASSAGE = 700, 300
TEXT = "".join(chr(32 + token % 90) for token in make_prompt(5, TOKENS))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def queries(tiny_model: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """The decoder's queries before and after RoPE, [L, Hq, T, D] float64 each."""
    decoder = ReferenceDecoder(tiny_model)
    tokens = calibrate.get_tokenizer(str(tiny_model)).encode(TEXT)
    before, after = [], []
    for start in range(0, TOKENS, PASSAGE):
        turned = decoder.forward(tokens[start : start + PASSAGE]).queries.double()
        half = decoder.head_dim // 2
        frequency = decoder.theta ** (-torch.arange(half).double() / half)
        angle = torch.arange(turned.shape[2])[:, None] * frequency
        pairs = torch.complex(*turned.chunk(2, -1)) * torch.exp(-1j * angle)
        before.append(torch.cat([pairs.real, pairs.imag], -1))
        after.append(turned)
    return torch.cat(before, 2), torch.cat(after, 2)


def made(
    monkeypatch: pytest.MonkeyPatch, model: Path, text: Path, kind: str
) -> Calibration:
    readers = []

    class Remembered(calibrate.QueryReader):
        def __init__(self, *args: object) -> None:
            super().__init__(*args)
            readers.append(self)

    monkeypatch.setattr(calibrate, "PASSAGE_TOKENS", PASSAGE)
    monkeypatch.setattr(calibrate, "QueryReader", Remembered)
    tokens = calibrate.read_tokens(str(model), text, TOKENS)
    result = calibrate.calibrate(
        kind, str(model), tokens, dtype="float32", gpu_memory_utilization=0.2
    )
    assert len(readers) == 1 and not readers[0].rope._forward_pre_hooks
    return result


def test_triattention(
    monkeypatch: pytest.MonkeyPatch,
    tiny_model: Path,
    text: Path,
    queries: tuple[torch.Tensor, torch.Tensor],
) -> None:
    got = made(monkeypatch, tiny_model, text, "triattention")
    assert (got.num_layers, got.num_heads, got.num_kv_heads) == (2, 4, 2)
    assert (got.head_dim, got.rope_theta, got.num_tokens) == (32, 1e4, TOKENS)
    assert got.model == str(tiny_model)
    pairs = torch.complex(*queries[0].chunk(2, -1))
    want = {
        "query_real": pairs.real.mean(2),
        "query_imag": pairs.imag.mean(2),
        "query_abs": pairs.abs().mean(2),
    }
    assert got.tensors.keys() == want.keys()
    for name, tensor in want.items():
        torch.testing.assert_close(
            got.tensors[name].double(), tensor, rtol=0, atol=1e-5
        )


def test_qfilter(
    monkeypatch: pytest.MonkeyPatch,
    tiny_model: Path,
    text: Path,
    queries: tuple[torch.Tensor, torch.Tensor],
) -> None:
    got = made(monkeypatch, tiny_model, text, "qfilter").tensors["filters"]
    assert got.shape == (2, 2, 32) and got.dtype == torch.float32
    after = queries[1]
    main = torch.linalg.svd(after, full_matrices=False).Vh[:, :, 0]
    sign = (after.mean(2) * main).sum(-1, keepdim=True).sign()
    want = (-sign * main).unflatten(1, (2, 2)).mean(2)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-4)


def test_the_command_writes_what_it_made(
    monkeypatch: pytest.MonkeyPatch,
    tiny_model: Path,
    text: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
) -> None:
    calls = []

    def fake(kind: str, model: str, tokens: list[int]) -> Calibration:
        calls.append((kind, model, len(tokens)))
        filters = {"filters": torch.arange(12.0).view(1, 3, 4)}
        return Calibration(kind, model, 1, 3, 3, 4, 1e4, len(tokens), filters)

    monkeypatch.setattr(calibrate, "calibrate", fake)
    output = tmp_path / "file"
    command = f"qfilter --model {tiny_model} --text {text} --tokens 99".split()
    main([*command, "--output", str(output)])
    assert calls == [("qfilter", str(tiny_model), 99)]
    got = load(output, "qfilter")
    assert (got.num_tokens, got.tensors["filters"].sum()) == (99, 66)
    told = json.dumps({"qfilter_calibration": str(output)})
    assert capsys.readouterr().out == (
        f"wrote {output}; serve with --kv-policy-config '{told}'\n"
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--tokens": "701"}, "has 700 tokens, expected 701 or more"),
        ({"--tokens": "0"}, "tokens: got 0, expected an integer >= 1"),
        ({"--text": "nowhere"}, "text: cannot read 'nowhere'"),
        (
            {"--output": f"{__file__}/file"},
            f"'{__file__}/file', but '{__file__}' is not a folder",
        ),
    ],
)
def test_the_command_refuses_before_it_loads_the_model(
    capsys: pytest.CaptureFixture,
    tiny_model: Path,
    text: Path,
    change: dict[str, str],
    message: str,
) -> None:
    given = {"--model": str(tiny_model), "--text": str(text), "--output": "file"}
    given = {**given, "--tokens": "100", **change}
    with pytest.raises(SystemExit):
        main(["qfilter", *(word for pair in given.items() for word in pair)])
    assert message in capsys.readouterr().err
