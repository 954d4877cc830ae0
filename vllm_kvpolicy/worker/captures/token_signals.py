"""Token signals: values measured when a token is computed, by logical position.

Measured in the forward pass, collected after it, read at events. A request that is
computed again after a preemption gets its signals again.

How far the outputs of chosen decoder layers move from token to token is measured by
forward hooks. They call a custom op that reads and writes buffers at fixed addresses,
so that torch.compile traces it as any other op and a captured graph replays it.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from vllm_kvpolicy.policies.base import LoadedModel, Needs
from vllm_kvpolicy.policies.hooks import Buffers, custom_op, decoder_layers
from vllm_kvpolicy.policies.scorers._signals import (
    TokenSignal,
    channel_variance,
    hidden_change,
)
from vllm_kvpolicy.protocol import CompactEvent
from vllm_kvpolicy.worker.batch import Batch
from vllm_kvpolicy.worker.captures.capture import Capture
from vllm_kvpolicy.worker.request_table import RequestRows
from vllm_kvpolicy.worker.step import Step, StepTokens
from vllm_kvpolicy.worker.transfer import Integers, to_device

FROM_BATCH = -1  # the token before is just before it in the batch


class HiddenStep(Buffers):
    """Measures ||h(t) - h(t - 1)|| of one decoder layer.

    Args:
        before: [step_tokens] int64, row of the token before, or FROM_BATCH.
        after: [step_tokens] int64, row that takes a token's output.
        left: [rows, d] model dtype, the output at each request's last token.
        change: [step_tokens] float32, what is measured.
    """

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
        torch.ops.vllm_kvpolicy.note_hidden_step(
            hidden, residual, self.before, self.after, self.left, self.change
        )


def _note_output(layer: nn.Module, _args: Any, output: Any) -> None:
    """Pass a layer's output to its `HiddenStep`; a forward hook."""
    hidden, residual = output if isinstance(output, tuple) else (output, None)
    layer.kv_policy_step(hidden, residual)


@custom_op("note_hidden_step", ["left", "change"])
def _note_hidden_step(
    hidden: torch.Tensor,
    residual: torch.Tensor | None,
    before: torch.Tensor,
    after: torch.Tensor,
    left: torch.Tensor,
    change: torch.Tensor,
) -> None:
    """Measure one layer's output against that of each token before.

    Args:
        hidden: [T, d] model dtype, the layer's output, or, where `residual` is given,
            the part of it that has yet to be added to the residual stream.
        residual: [T, d] model dtype, the residual stream; None where `hidden` is whole.
    """
    num_tokens = len(hidden)
    output = hidden if residual is None else hidden + residual
    before = before[:num_tokens]
    stored = left[before.clamp_min(0)]
    previous = torch.where((before < 0)[:, None], output.roll(1, 0), stored)
    change[:num_tokens] = hidden_change(output, previous)
    left[after[:num_tokens]] = output


class TokenSignals(Capture):
    """Measures signals of new tokens; keeps a float32 per (request, signal, position).

    The output of a layer at a request's last token is kept for its next step, so that
    chunks of a prompt do not matter.

    Args:
        model: which it measures once it is attached.

    Raises:
        ValueError: a signal of layers that the model does not have.
    """

    holds = "signals of tokens"

    @staticmethod
    def serves(needs: Needs) -> bool:
        return bool(needs.signals)

    def __init__(self, signals: Sequence[TokenSignal], model: LoadedModel) -> None:
        config, device = model.vllm_config, model.device
        self.signals, self.num_layers, self.device = signals, len(model.layers), device
        # One more row is for padding.
        num_requests = config.scheduler_config.max_num_seqs
        self._rows = RequestRows(num_requests)
        shape = num_requests + 1, len(signals), config.model_config.max_model_len
        self._table = torch.zeros(shape, device=device)
        tokens = torch.zeros(model.step_tokens, dtype=torch.int64, device=device)
        self._before = torch.full_like(tokens, FROM_BATCH)
        self._after = torch.full_like(tokens, num_requests)
        width = config.model_config.get_hidden_size()
        left = torch.zeros(num_requests + 1, width, dtype=model.dtype, device=device)
        change = torch.zeros(model.step_tokens, device=device)
        layers = {
            layer
            for signal in signals
            if signal.kind == "hidden"
            for layer in signal.layers(self.num_layers)
        }
        # Copies, not views: compiled graphs must not be given parts of one buffer.
        shared = {"before": self._before, "after": self._after}
        self._steps = {
            layer: HiddenStep(**shared, left=left.clone(), change=change.clone())
            for layer in sorted(layers)
        }
        kinds = {signal.kind for signal in signals} - {"hidden"}
        self._variances = {
            kind: change.new_zeros(self.num_layers, len(change)) for kind in kinds
        }
        of_step = len(self._steps) * (left.nbytes + change.nbytes)
        tensors = [self._table, self._before, self._after, *self._variances.values()]
        self.nbytes = of_step + sum(tensor.nbytes for tensor in tensors)
        # Row and position of each token of the step.
        self._plan: tuple[torch.Tensor, torch.Tensor] | None = None

    def attach(self, model: nn.Module) -> None:
        """Hook the model; before it is compiled or captured.

        Raises:
            ValueError: its decoder layers cannot be found.
        """
        found = decoder_layers(model, self.num_layers) if self._steps else ()
        for layer, step in self._steps.items():
            found[layer].add_module("kv_policy_step", step)
            found[layer].register_forward_hook(_note_output)

    def drop(self, request_ids: Iterable[str]) -> None:
        self._rows.drop(request_ids)

    def plan(self, step: Step) -> None:
        rows = self._rows.take_all(step.request_ids, step.metadata.num_reqs)
        tokens = StepTokens.of(step.metadata)
        of_batch = to_device(rows, self.device)
        row = torch.where(tokens.is_real, of_batch[tokens.row], self._rows.null_row)
        null_row, num_tokens = self._rows.null_row, len(row)
        self._before[:num_tokens] = torch.where(tokens.is_first, row, FROM_BATCH)
        self._after[:num_tokens] = torch.where(tokens.is_last, row, null_row)
        self._plan = row, tokens.position

    def observe(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Measure one layer's new keys and values, [T, H, D] each."""
        for kind, vectors in (("key", key), ("value", value)):
            if kind in self._variances:
                self._variances[kind][layer, : len(vectors)] = channel_variance(vectors)

    def end_step(self) -> None:
        """Store what the forward pass measured, if one was planned."""
        if self._plan is None:
            return
        row, position = self._plan
        values = [self._measured(signal, position) for signal in self.signals]
        self._table[row, :, position] = torch.stack(values, -1)
        self._after.fill_(self._rows.null_row)
        self._plan = None

    def _measured(self, signal: TokenSignal, position: torch.Tensor) -> torch.Tensor:
        """Return [T] float32, the mean over the signal's layers."""
        layers, num_tokens = signal.layers(self.num_layers), len(position)
        if signal.kind != "hidden":
            rows = self._variances[signal.kind][layers.start : layers.stop, :num_tokens]
            return rows.double().mean(0).float()
        changes = [self._steps[layer].change[:num_tokens] for layer in layers]
        mean = torch.stack(changes).double().mean(0)
        # The first token has no token before it.
        return torch.where(position > 0, mean, 0.0).float()

    def numbers(
        self, events: Sequence[CompactEvent], needs: Needs
    ) -> dict[str, Integers]:
        return {"signal_rows": self.rows_of([event.request_id for event in events])}

    def read(self, batch: Batch) -> Mapping[str, Any]:
        longest = max(event.position for event in batch.events)
        return {"signals": self.values(batch.sent["signal_rows"], longest)}

    def rows_of(self, request_ids: Sequence[str]) -> np.ndarray:
        """Return [E] int64 rows of requests; new ones take free rows."""
        return self._rows.take_all(request_ids, len(request_ids))

    def values(
        self, rows: torch.Tensor, num_positions: int
    ) -> dict[TokenSignal, torch.Tensor]:
        """Return every signal of requests in rows [E], each [E, num_positions] float32.

        Values after a request's last computed token are unspecified.
        """
        values = self._table[rows, :, :num_positions]
        return dict(zip(self.signals, values.unbind(1), strict=True))
