"""Gradients are the same if the backward pass computes layers again."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from support.training_rows import ids
from training import dms, model
from training import wgkv as wgkv_trainer
from training.dms_student import BORROWED, Retrofit, Settings, new_adapter
from training.model import Base, load_base
from training.rows import Row
from training.run import RowLosses

Case = tuple[Base, dict[str, torch.Tensor], RowLosses]
TOKENS, WINDOW = 48, 6


def wgkv(folder: Path, again: bool, dtype: torch.dtype) -> Case:
    base = load_base(str(folder), "cpu", dtype, gradient_checkpointing=again)
    settings = wgkv_trainer.Settings(1.2, window=WINDOW)
    weights = wgkv_trainer.new_gates(base, settings)

    def losses(_: int, __: int, row: Row) -> dict[str, torch.Tensor]:
        return wgkv_trainer._losses(base, settings, weights, row)

    return base, weights.tensors(), losses


def adapter(folder: Path, again: bool, dtype: torch.dtype) -> Case:
    base = load_base(str(folder), "cpu", dtype, gradient_checkpointing=again)
    retrofit = Retrofit(Settings(window=WINDOW), base, base, new_adapter(base))
    drawn = torch.randn(2, 2, 64, generator=torch.Generator().manual_seed(0))
    retrofit.weights.projection.data = 0.05 * drawn

    def losses(_: int, index: int, row: Row) -> dict[str, torch.Tensor]:
        return dms._losses(retrofit, 500, index, row)  # of a high ratio

    return base, retrofit.tensors(), losses


def borrowed(folder: Path, again: bool, dtype: torch.dtype) -> Case:
    teacher = load_base(str(folder), "cpu", dtype)
    student = load_base(str(folder), "cpu", dtype, True, again)
    retrofit = Retrofit(BORROWED, teacher, student)

    def losses(_: int, index: int, row: Row) -> dict[str, torch.Tensor]:
        return dms._losses(retrofit, 2600, index, row)

    return student, retrofit.tensors(), losses


def gradients(case: Case) -> tuple[dict[str, torch.Tensor], int]:
    """The gradients of a row by tensor, and how often a layer computed for them."""
    base, tensors, losses = case
    layer, calls = base.decoder.layers[0].mlp, []
    handle = layer.register_forward_pre_hook(lambda *_: calls.append(1))
    loss = losses(0, 0, Row(ids(TOKENS)))["loss"]
    before = len(calls)
    loss.backward()
    handle.remove()
    return {name: t.grad for name, t in tensors.items()}, len(calls) - before


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Blocks of attention are computed again too, inside of layers that are."""
    monkeypatch.setattr(model, "BLOCK", 16)
    yield


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("trainer", [wgkv, adapter, borrowed])
def test_gradients_are_the_same(
    request: pytest.FixtureRequest, tiny_model: Path, trainer, dtype: torch.dtype
) -> None:
    want, none = gradients(trainer(tiny_model, False, dtype))
    got, once = gradients(trainer(tiny_model, True, dtype))
    assert (none, once) == (0, 1)
    assert max(gradient.abs().max() for gradient in want.values()) > 1e-4
    for name, gradient in want.items():
        assert torch.equal(got[name], gradient), name
