"""The worker's half of a policy: what happens around each step's forward pass.

Owned by the worker mixin; the metadata builder and the attention implementation reach
it through the attention layers of their own model, never through a global.
Process: worker
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from vllm_kvpolicy.attention.compaction import Compactor
from vllm_kvpolicy.attention.pages import HeadPages, check_layout
from vllm_kvpolicy.attention.slots import SlotTable
from vllm_kvpolicy.attention.staging import to_device
from vllm_kvpolicy.attention.survivors import SurvivorMemory
from vllm_kvpolicy.attention.trace import Tracer
from vllm_kvpolicy.attention.windows import QueryWindows
from vllm_kvpolicy.block_manager.limits import max_global_blocks, planner_limits
from vllm_kvpolicy.config import KVPolicyConfig
from vllm_kvpolicy.metrics import WorkerCounters
from vllm_kvpolicy.policies.factory import build
from vllm_kvpolicy.protocol import StepCommands


class KVPolicyRuntime:
    """Slots, windows and compactor of one worker.

    Args:
        vllm_config: the engine's configuration.
        config: the engine's policy.
        layers: the model's attention layers in model order; each learns its index and
            this object.
        device: where the model runs.

    Attributes:
        batch_request_ids: returns the requests of the current batch in row order; set
            by the worker mixin.
    """

    def __init__(
        self,
        vllm_config: Any,
        config: KVPolicyConfig,
        layers: Sequence[Any],
        device: torch.device,
    ) -> None:
        self.config = config
        self.layers = list(layers)
        self.policy = build(config.policy, config.options)
        self.limits = planner_limits(vllm_config, config)
        block_size = self.limits.block_size
        num_slots = vllm_config.scheduler_config.max_num_seqs
        num_global = max_global_blocks(vllm_config, config)
        first = self.layers[0]
        self.slots = SlotTable(num_slots, num_global, block_size, device)
        self.windows = QueryWindows(
            num_slots=self.limits.window_slots,
            window_tokens=self.limits.window_tokens,
            num_layers=len(self.layers),
            num_heads=first.num_heads,
            head_dim=first.head_size,
            dtype=vllm_config.model_config.dtype,
            device=device,
        )
        self.credit = None
        if self.policy.has_credit:
            self.credit = SurvivorMemory(
                num_slots,
                len(self.layers),
                first.num_kv_heads,
                (num_global + 1) * block_size + config.recent_tokens,
                torch.float32,
                device,
            )
        self.compactor: Compactor
        self.counters = WorkerCounters(vllm_config.instance_id, block_size)
        self.batch_request_ids: Callable[[], Sequence[str]] = tuple
        self._commands: StepCommands | None = None
        for index, layer in enumerate(self.layers):
            layer.kv_policy = self
            layer.kv_policy_index = index

    @property
    def side_bytes(self) -> int:
        """Bytes of device memory that this object holds beside vLLM's KV cache."""
        tensors = [self.windows.rows, self.slots.global_blocks]
        if self.credit is not None:
            tensors.append(self.credit.values)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def bind(self, keys_are_columns: bool) -> None:
        """Take hold of the KV caches, once vLLM has made them.

        Args:
            keys_are_columns: see `attention.pages.split_pages`.
        """
        pages = HeadPages([layer.kv_cache for layer in self.layers], keys_are_columns)
        check_layout(self.layers[0], pages, 0)
        trace_dir = self.config.trace_dir
        self.compactor = Compactor(
            policy=self.policy,
            pages=pages,
            slots=self.slots,
            windows=self.windows,
            credit=self.credit,
            tracer=Tracer(trace_dir, self.slots) if trace_dir else None,
            scale=self.layers[0].impl.scale,
        )

    def begin_step(self, commands: StepCommands, gone: Sequence[str]) -> None:
        """Run the step's events; the forward pass may follow.

        Args:
            commands: what the scheduler attached to its output.
            gone: requests that finished or were preempted before this step.
        """
        self.slots.drop(gone)
        if commands.events:
            started = time.perf_counter()
            self.compactor.run(commands.events)
            self.counters.add_events(commands.events, time.perf_counter() - started)
        self._commands = commands

    def end_step(self) -> None:
        """Forget the step; metadata built outside a step is stock."""
        self._commands = None
        self.windows.forget_plan()

    def physical(self, metadata: Any) -> Any:
        """Return the attention metadata with physical tables and lengths.

        Positions, slot mapping and query layout stay logical. Without a step, or
        before any request has had an event, the metadata is returned as it is.

        Args:
            metadata: vLLM's CommonAttentionMetadata of this KV cache group.
        """
        if self._commands is None:
            return metadata
        request_ids = self.batch_request_ids()
        if self._commands.captures:
            query_start = metadata.query_start_loc_cpu.numpy()
            self.windows.plan(self._commands.captures, request_ids, query_start)
        if not len(self.slots):
            return metadata
        rows_host = self.slots.rows(request_ids, metadata.num_reqs)
        rows = to_device(rows_host, self.slots.device)
        upper = metadata.seq_lens_cpu_upper_bound.numpy()
        upper = upper - self.slots.dropped_tokens_cpu[rows_host]
        max_seq_len = int(upper.max())
        width = -(-max_seq_len // self.limits.block_size)
        return metadata.replace(
            block_table_tensor=self.slots.physical_tables(
                rows, metadata.block_table_tensor, width
            ),
            seq_lens=metadata.seq_lens - self.slots.dropped_tokens(rows),
            seq_lens_cpu_upper_bound=torch.from_numpy(np.ascontiguousarray(upper)),
            max_seq_len=max_seq_len,
            _num_computed_tokens_cache=None,
        )
