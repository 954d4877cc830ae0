"""Token signals: values measured when a token is computed, by logical position.

Measured in the forward pass, collected after it, read at events. A request that is
computed again after a preemption gets its signals again.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from vllm_kvpolicy.kernels.token_signals import channel_variance
from vllm_kvpolicy.policies.base import Needs, TokenSignal
from vllm_kvpolicy.protocol import CompactEvent
from vllm_kvpolicy.worker.batch import Batch
from vllm_kvpolicy.worker.captures.capture import Capture
from vllm_kvpolicy.worker.captures.hidden_states import HiddenSteps
from vllm_kvpolicy.worker.request_table import RequestRows
from vllm_kvpolicy.worker.step import Step, StepTokens
from vllm_kvpolicy.worker.transfer import Integers, to_device


class TokenSignals(Capture):
    """One float32 per (request, signal, position).

    Args:
        signals: what to measure.
        num_layers: L, decoder layers of the model.
        num_requests: requests that may be live at once.
        max_model_len: longest request, in tokens.
        step_tokens: most tokens of a step.
        hidden_size: d, width of the residual stream.
        dtype: the model's dtype.
        device: where the model runs.

    Raises:
        ValueError: a signal of layers that the model does not have.
    """

    def __init__(
        self,
        signals: Sequence[TokenSignal],
        num_layers: int,
        num_requests: int,
        max_model_len: int,
        step_tokens: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.signals = tuple(signals)
        self.num_layers = num_layers
        self.device = device
        self._rows = RequestRows(num_requests)
        shape = (num_requests + 1, len(signals), max_model_len)
        self._table = torch.zeros(shape, device=device)
        hidden = [s.layers(num_layers) for s in signals if s.kind == "hidden"]
        self._hidden = HiddenSteps(
            sorted({layer for layers in hidden for layer in layers}),
            num_requests,
            step_tokens,
            hidden_size,
            dtype,
            device,
        )
        kinds = {signal.kind for signal in signals} - {"hidden"}
        self._variances = {
            kind: torch.zeros(num_layers, step_tokens, device=device) for kind in kinds
        }
        # Row and position of each token of the step.
        self._plan: tuple[torch.Tensor, torch.Tensor] | None = None

    @classmethod
    def of_engine(
        cls,
        signals: Sequence[TokenSignal],
        model: nn.Module,
        num_layers: int,
        vllm_config: Any,
        device: torch.device,
    ) -> "TokenSignals":
        """Size the tables for an engine and attach to its model.

        Args:
            signals: what to measure.
            model: the loaded model, not yet compiled or captured.
            num_layers: L, decoder layers of the model.
            vllm_config: the engine's configuration.
            device: where the model runs.

        Raises:
            ValueError: the layers cannot be found.
        """
        scheduler, model_config = vllm_config.scheduler_config, vllm_config.model_config
        table = cls(
            signals,
            num_layers=num_layers,
            num_requests=scheduler.max_num_seqs,
            max_model_len=model_config.max_model_len,
            step_tokens=scheduler.max_num_batched_tokens,
            hidden_size=model_config.get_hidden_size(),
            dtype=model_config.dtype,
            device=device,
        )
        table.attach(model)
        return table

    @property
    def nbytes(self) -> int:
        """Bytes of device memory."""
        variances = sum(rows.nbytes for rows in self._variances.values())
        return self._table.nbytes + self._hidden.nbytes + variances

    def attach(self, model: nn.Module) -> None:
        """Hook the model; before it is compiled or captured.

        Raises:
            ValueError: its decoder layers cannot be found.
        """
        if self._hidden.layers:
            self._hidden.attach(model, self.num_layers)

    def drop(self, request_ids: Iterable[str]) -> None:
        """Forget requests that finished, were aborted or were preempted."""
        self._rows.drop(request_ids)

    def plan(self, step: Step) -> None:
        """Note which tokens the coming forward pass computes."""
        rows = self._rows.take_all(step.request_ids, step.metadata.num_reqs)
        tokens = StepTokens.of(step.metadata)
        of_batch = to_device(rows, self.device)
        row = torch.where(tokens.is_real, of_batch[tokens.row], self._rows.null_row)
        self._hidden.plan(row, tokens.is_first, tokens.is_last)
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
        self._hidden.end_step()
        self._plan = None

    def _measured(self, signal: TokenSignal, position: torch.Tensor) -> torch.Tensor:
        """Return [T] float32, the mean over the signal's layers."""
        layers, num_tokens = signal.layers(self.num_layers), len(position)
        if signal.kind != "hidden":
            rows = self._variances[signal.kind][layers.start : layers.stop, :num_tokens]
            return rows.double().mean(0).float()
        first = self._hidden.layers.index(layers.start)
        changes = self._hidden.changes[first : first + len(layers)]
        mean = torch.stack([row[:num_tokens] for row in changes]).double().mean(0)
        # The first token has no token before it.
        return torch.where(position > 0, mean, 0.0).float()

    def numbers(
        self, events: Sequence[CompactEvent], needs: Needs
    ) -> dict[str, Integers]:
        """Return the rows of the requests; see `Capture.numbers`."""
        if not needs.signals:
            return {}
        return {"signal_rows": self.rows_of([event.request_id for event in events])}

    def read(self, batch: Batch) -> Mapping[str, Any]:
        """Return the signals of the batch's requests up to their events."""
        if not batch.policy.needs.signals:
            return {}
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
