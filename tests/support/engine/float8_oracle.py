"""A decoder over an FP8 cache, and what the server put into that cache.

Where a key lies on the edge between two stored numbers, the last bit of a float32 sum
decides which one it becomes, and that is another answer. So the decoder rounds what the
server was about to store, after it has checked that its own numbers are the same.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from vllm.model_executor.layers.attention import attention

from support.engine.helpers import Engine, Job, Run, Session
from support.engine.oracle_replay import Mismatch
from support.engine.reference_decoder import ReferenceDecoder
from vllm_kvpolicy.worker.captures.capture import Capture
from vllm_kvpolicy.worker.step import Step, StepTokens

STORED = {"fp8": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
SCALES = ((0.5, 2.0), (0.25, 0.5))  # of keys and values, by layer: exact in any kernel
TOLERANCE = 1e-4
Seen = dict[str, torch.Tensor]


def towards_zero(numbers: torch.Tensor, stored: torch.dtype) -> torch.Tensor:
    """Round as vLLM's CPU kernel stores a token, which cuts digits off."""
    limit = torch.finfo(stored).max
    bounded = numbers.clamp(-limit, limit)
    nearest = bounded.to(stored)
    is_above = nearest.float().abs() > bounded.abs()
    return (nearest.view(torch.uint8) - is_above.byte()).view(stored).float()


class StoredTokens(Capture):
    """Notes the keys and values of every token, before the cache rounds them.

    Attributes:
        seen: by vLLM's request id, [2, L, H, T, D] float32, NaN where nothing was seen.
    """

    def __init__(self, decoder: ReferenceDecoder, max_tokens: int) -> None:
        heads = decoder.num_layers, decoder.num_heads
        self.shape = 2, *heads, max_tokens, decoder.head_dim
        self.seen: Seen = {}
        self._step: tuple[list[str], StepTokens] | None = None

    def plan(self, step: Step) -> None:
        """Note which tokens the coming forward pass computes."""
        self._step = list(step.request_ids), StepTokens.of(step.metadata)

    def observe(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """See one layer's new tokens."""
        assert self._step is not None
        names, tokens = self._step
        for row, name in enumerate(names):
            mine = (tokens.is_real & (tokens.row == row)).nonzero().flatten()
            rows = self.seen.setdefault(name, torch.full(self.shape, torch.nan))
            for part, vectors in enumerate((key, value)):
                place = tokens.position[mine]
                found = vectors[mine].view(len(mine), *self.shape[2::2])
                rows[part, layer][:, place] = found.transpose(0, 1).float()

    def end_step(self) -> None:
        """See nothing until the next `plan`."""
        self._step = None


class RoundedCache:
    """A cache that rounds keys and values by scale and layer; see `ReferenceDecoder`.

    Args:
        stored: the cache's numbers.
        seen: [2, L, H, T, D], what the server was about to store.
        scales: L of keys and L of values; 1 where there are none.
    """

    def __init__(
        self,
        stored: torch.dtype,
        seen: torch.Tensor,
        scales: Sequence[Sequence[float]] = (),
    ) -> None:
        self.stored, self.seen = stored, seen
        self.scales = scales or [[1.0] * seen.shape[1]] * 2

    def __call__(self, layer: int, *own: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return keys and values [H, T, D] of a layer as the cache gives them back."""
        found = []
        for part, vectors in enumerate(own):
            server = self.seen[part, layer][:, : vectors.shape[1]]
            server = torch.where(server.isnan(), vectors, server)
            if not torch.allclose(server, vectors, TOLERANCE, TOLERANCE):
                raise Mismatch(f"layer {layer}: the server stored other keys or values")
            scale = self.scales[part][layer]
            found.append(towards_zero(server / scale, self.stored) * scale)
        return tuple(found)


@contextmanager
def scaled_cache(scales: Sequence[Sequence[float]]) -> Iterator[None]:
    """Give the layers of an engine that starts in here scales, as a checkpoint does."""
    stock, layers = attention.set_default_quant_scales, list[Any]()

    def set_scales(layer: Any, register_buffer: bool = False) -> None:
        stock(layer, register_buffer)
        if layer not in layers:
            layers.append(layer)
        index = layers.index(layer)
        for name, values in zip("kv", scales, strict=True):
            getattr(layer, f"_{name}_scale").fill_(values[index])
            setattr(layer, f"_{name}_scale_float", values[index])

    with patch.object(attention, "set_default_quant_scales", set_scales):
        yield


def check_storage(engine: Engine, kind: str) -> None:
    """The cache holds bytes, and the policy's views read them as FP8."""
    pool, caches = engine.runtime.compactor.pool, engine.worker.model_runner.kv_caches
    assert {cache.dtype for cache in caches} == {torch.uint8}
    assert {view.dtype for view in pool.keys + pool.values} == {STORED[kind]}
    starts = {cache.untyped_storage().data_ptr() for cache in caches}
    assert {view.untyped_storage().data_ptr() for view in pool.keys} == starts


def run_and_see(
    engine: Engine, jobs: list[Job], decoder: ReferenceDecoder
) -> tuple[Run, Seen]:
    """Run jobs of at most 1024 tokens; return what was stored by the name of a job."""
    capture = StoredTokens(decoder, 1024)
    engine.runtime.captures.append(capture)
    session = Session(engine, jobs)
    while session.step():
        pass
    named: dict[str, Any] = {n: job.name for n, job in session.jobs.items()}
    return session.finish(), {named[n]: seen for n, seen in capture.seen.items()}
