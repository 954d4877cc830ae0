"""What hooks on decoder layers measure is what a plain decoder computes.

Chunked prompts, neighbours, preemption; eager, compiled, and compiled code from the
cache of an earlier engine.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from support.engine.reference_decoder import ReferenceDecoder
from support.engine.run_hidden_states import LENGTHS, NEW_TOKENS, run
from support.tiny_model import make_tiny_model

TESTS = Path(__file__).parents[1]
PROGRAM = "support.engine.run_hidden_states"  # a module, run within TESTS
LAYERS = 4
SERVE_MODE = 2  # DYNAMO_TRACE_ONCE, what vLLM takes on CPU
HIDDEN_LAYERS = (1, 2)  # 10 and 21 of 32, in a model of 4
RTOL = 1e-4


class HiddenDecoder(ReferenceDecoder):
    """The reference decoder, keeping the output of each layer."""

    def _mlp(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        added = super()._mlp(layer, hidden)
        self.outputs[layer] = hidden + added
        return added

    def signals(self, tokens: list[int]) -> dict[str, np.ndarray]:
        """Measure a sequence at once; [T] each, named as `run_hidden_states` does."""
        self.outputs: dict[int, torch.Tensor] = {}
        keys = self.forward(tokens).keys
        steps = {
            f"hidden{number}": torch.zeros(len(tokens))
            for number in range(len(HIDDEN_LAYERS))
        }
        for step, layer in zip(steps.values(), HIDDEN_LAYERS, strict=True):
            step[1:] = self.outputs[layer].diff(dim=0).norm(dim=-1)
        rows = {**steps, "key0": keys.var(-1).mean((0, 1))}
        return {name: row.numpy() for name, row in rows.items()}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), layers=LAYERS)


def check(found: dict[str, np.ndarray], model: Path) -> None:
    """Compare every signal of every token with the reference."""
    assert found["preemptions"] > 0
    decoder = HiddenDecoder(model)
    for index, length in enumerate(LENGTHS):
        tokens = found[f"r{index}_tokens"].tolist()
        assert len(tokens) == length + NEW_TOKENS
        for name, want in decoder.signals(tokens).items():
            got = found[f"r{index}_{name}"]
            assert len(got) > length + NEW_TOKENS / 2
            np.testing.assert_allclose(got, want[: len(got)], rtol=RTOL, atol=1e-6)
            assert want[1:].std() > 0.01


def test_eager(model: Path) -> None:
    check(run(model), model)


@pytest.mark.slow
def test_compiled_twice(model: Path, tmp_path: Path) -> None:
    caches = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CACHE_ROOT": str(tmp_path / "cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
    }
    for name in ("cold", "warm"):
        out = tmp_path / f"{name}.npz"
        done = subprocess.run(
            [sys.executable, "-m", PROGRAM, str(model), str(out)],
            cwd=TESTS,
            env={**os.environ, **caches},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        with np.load(out) as found:
            assert found["mode"] == SERVE_MODE
            check(dict(found), model)
    assert list(tmp_path.glob("cache/torch_compile_cache/*"))
