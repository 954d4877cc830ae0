"""What hooks on decoder layers measure is what a plain decoder computes.

Chunked prompts, neighbours, preemption; eager, compiled, and compiled code from the
cache of an earlier engine.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

from support.engine.reference_decoder import ReferenceDecoder
from support.engine.run_compiled import caches_in
from support.engine.run_hidden_states import LENGTHS, NEW_TOKENS, run
from support.programs import run_program
from support.tiny_model import make_tiny_model

PROGRAM = "support.engine.run_hidden_states"
LAYERS = 4
SERVE_MODE = 2  # DYNAMO_TRACE_ONCE, what vLLM takes on CPU
HIDDEN_LAYERS = (1, 2)  # 10 and 21 of 32, in a model of 4
RTOL = 1e-4


def signals(decoder: ReferenceDecoder, tokens: list[int]) -> dict[str, np.ndarray]:
    """Measure a sequence at once; [T] each, named as `run_hidden_states` does."""
    seen = decoder.forward(tokens)
    rows = {"key0": seen.keys.var(-1).mean((0, 1))}
    for number, layer in enumerate(HIDDEN_LAYERS):
        steps = seen.hidden[layer].diff(dim=0).norm(dim=-1)
        rows[f"hidden{number}"] = torch.nn.functional.pad(steps, (1, 0))
    return {name: row.numpy() for name, row in rows.items()}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), layers=LAYERS)


def check(found: dict[str, np.ndarray], model: Path) -> None:
    """Compare every signal of every token with the reference."""
    assert found["preemptions"] > 0
    decoder = ReferenceDecoder(model)
    for index, length in enumerate(LENGTHS):
        tokens = found[f"r{index}_tokens"].tolist()
        assert len(tokens) == length + NEW_TOKENS
        for name, want in signals(decoder, tokens).items():
            got = found[f"r{index}_{name}"]
            assert len(got) > length + NEW_TOKENS / 2
            np.testing.assert_allclose(got, want[: len(got)], rtol=RTOL, atol=1e-6)
            assert want[1:].std() > 0.01


def test_eager(model: Path) -> None:
    check(run(model), model)


@pytest.mark.slow
def test_compiled_twice(model: Path, tmp_path: Path) -> None:
    for name in ("cold", "warm"):
        out = tmp_path / f"{name}.npz"
        run_program(PROGRAM, model, out, **caches_in(tmp_path))
        with np.load(out) as found:
            assert found["mode"] == SERVE_MODE
            check(dict(found), model)
    assert list(tmp_path.glob("cache/torch_compile_cache/*"))
