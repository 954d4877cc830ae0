"""Measures how far the outputs of chosen decoder layers move from token to token.

Forward hooks on the loaded model's decoder layers call a custom op that reads and
writes buffers at fixed addresses, so that torch.compile traces them as any other op
and a captured graph replays them.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from vllm.utils.torch_utils import direct_register_custom_op

from vllm_kvpolicy.kernels.token_signals import hidden_change
from vllm_kvpolicy.policies.model_parts import decoder_layers

FROM_BATCH = -1  # the token before is just before it in the batch


class HiddenStep(nn.Module):
    """Measures ||h(t) - h(t - 1)|| of one decoder layer.

    A submodule of that layer: compiled code that vLLM saves and loads again finds a
    module's buffers by their names, but loses tensors that a hook closes over.

    Args:
        before: [step_tokens] int64, row of the token before, or FROM_BATCH.
        after: [step_tokens] int64, row that takes a token's output.
        left: [rows, d] model dtype, the output at each request's last token.
        change: [step_tokens] float32, what is measured.
    """

    def __init__(
        self,
        before: torch.Tensor,
        after: torch.Tensor,
        left: torch.Tensor,
        change: torch.Tensor,
    ) -> None:
        super().__init__()
        self.register_buffer("before", before, persistent=False)
        self.register_buffer("after", after, persistent=False)
        self.register_buffer("left", left, persistent=False)
        self.register_buffer("change", change, persistent=False)

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
        """Measure one forward pass of the layer; see `_note_hidden_step`."""
        torch.ops.vllm_kvpolicy.note_hidden_step(
            hidden, residual, self.before, self.after, self.left, self.change
        )


class HiddenSteps:
    """Measures some layers for the tokens of each step.

    The output at a request's last token is kept for its next step, so that chunks of a
    prompt do not matter.

    Args:
        layers: decoder layers to measure, ascending.
        num_requests: requests that may be live at once; one more row is for padding.
        step_tokens: most tokens of a step.
        hidden_size: d, width of the residual stream.
        dtype: the model's dtype.
        device: where the model runs.

    Attributes:
        changes: one [step_tokens] float32 per layer, filled by the forward pass.
    """

    def __init__(
        self,
        layers: Sequence[int],
        num_requests: int,
        step_tokens: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.layers = tuple(layers)
        self.null_row = num_requests
        tokens = torch.zeros(step_tokens, dtype=torch.int64, device=device)
        self._before = torch.full_like(tokens, FROM_BATCH)
        self._after = torch.full_like(tokens, num_requests)
        left = torch.zeros(num_requests + 1, hidden_size, dtype=dtype, device=device)
        change = torch.zeros(step_tokens, device=device)
        # Copies, not views: compiled graphs must not be given parts of one buffer.
        self._steps = [
            HiddenStep(self._before, self._after, left.clone(), change.clone())
            for _ in layers
        ]
        self.changes = [step.change for step in self._steps]

    @property
    def nbytes(self) -> int:
        """Bytes of device memory."""
        own = sum(step.left.nbytes + step.change.nbytes for step in self._steps)
        return own + self._before.nbytes + self._after.nbytes

    def attach(self, model: nn.Module, num_layers: int) -> None:
        """Hook the layers; before the model is compiled or captured.

        Args:
            model: vLLM's model.
            num_layers: decoder layers of the model.

        Raises:
            ValueError: its decoder layers cannot be found.
        """
        found = decoder_layers(model, num_layers)
        for index, step in zip(self.layers, self._steps, strict=True):
            found[index].add_module("kv_policy_step", step)
            found[index].register_forward_hook(_note_output)

    def plan(
        self, row: torch.Tensor, is_first: torch.Tensor, is_last: torch.Tensor
    ) -> None:
        """Note which tokens of the coming forward pass belong together.

        Args:
            row: [T] int64, row of each token's request.
            is_first: [T] bool, first of its request in this step.
            is_last: [T] bool, last of its request in this step.
        """
        num_tokens = len(row)
        self._before[:num_tokens] = torch.where(is_first, row, FROM_BATCH)
        self._after[:num_tokens] = torch.where(is_last, row, self.null_row)

    def end_step(self) -> None:
        """Leave the rows alone until the next `plan`."""
        self._after.fill_(self.null_row)


def _note_output(layer: nn.Module, _args: Any, output: Any) -> None:
    """Pass a layer's output to its `HiddenStep`; a forward hook."""
    hidden, residual = output if isinstance(output, tuple) else (output, None)
    layer.kv_policy_step(hidden, residual)


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
        before: [>= T] int64, row of the token before, or FROM_BATCH.
        after: [>= T] int64, row that takes this token's output.
        left: [rows, d] model dtype, read, then written.
        change: [>= T] float32, written.
    """
    num_tokens = len(hidden)
    output = hidden if residual is None else hidden + residual
    before = before[:num_tokens]
    stored = left[before.clamp_min(0)]
    previous = torch.where((before < 0)[:, None], output.roll(1, 0), stored)
    change[:num_tokens] = hidden_change(output, previous)
    left[after[:num_tokens]] = output


def _note_hidden_step_fake(
    hidden: torch.Tensor,
    residual: torch.Tensor | None,
    before: torch.Tensor,
    after: torch.Tensor,
    left: torch.Tensor,
    change: torch.Tensor,
) -> None:
    """Return nothing: the op writes into its arguments."""


_LIBRARY = torch.library.Library("vllm_kvpolicy", "FRAGMENT")
direct_register_custom_op(
    "note_hidden_step",
    _note_hidden_step,
    mutates_args=["left", "change"],
    fake_impl=_note_hidden_step_fake,
    target_lib=_LIBRARY,
)
