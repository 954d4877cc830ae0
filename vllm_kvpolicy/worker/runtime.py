"""The worker's half of a policy: what happens around each step's forward pass.

Owned by the worker mixin; the metadata builder and the attention implementation reach
it through the attention layers of their own model, never through a global.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial, reduce
from operator import or_
from typing import Any

import numpy as np
import torch
from vllm.logger import init_logger

from vllm_kvpolicy import compat
from vllm_kvpolicy.config import KVPolicyConfig
from vllm_kvpolicy.metrics import WorkerCounters
from vllm_kvpolicy.policies.base import Needs
from vllm_kvpolicy.policies.build import build
from vllm_kvpolicy.protocol import StepCommands, UsedBlocks
from vllm_kvpolicy.sizes import max_global_blocks, planner_limits
from vllm_kvpolicy.worker.captures.query_windows import QueryWindows
from vllm_kvpolicy.worker.captures.token_signals import TokenSignals
from vllm_kvpolicy.worker.captures.visible_until import Expiries
from vllm_kvpolicy.worker.compaction import POSITIONS, Answer, Compactor
from vllm_kvpolicy.worker.late_tables import LateTables
from vllm_kvpolicy.worker.pages import PagePool, check_layout
from vllm_kvpolicy.worker.refused import refused_for
from vllm_kvpolicy.worker.rotary import model_rope
from vllm_kvpolicy.worker.slots import SlotTable
from vllm_kvpolicy.worker.survivors import SurvivorMemory
from vllm_kvpolicy.worker.tiers.equal_step import PhysicalTables
from vllm_kvpolicy.worker.tiers.head_tables import HeadTables
from vllm_kvpolicy.worker.tiers.layouts import EqualLayout, Layout, RaggedLayout
from vllm_kvpolicy.worker.tiers.page_selection import PageSelection, SelectedBatch
from vllm_kvpolicy.worker.tiers.ragged_step import (
    FoldedBatch,
    FoldedTables,
    Folder,
)
from vllm_kvpolicy.worker.trace import Tracer
from vllm_kvpolicy.worker.transfer import to_device
from vllm_kvpolicy.worker.warmup import NAMES, rehearsals

logger = init_logger("vllm.kv_policy")


class KVPolicyRuntime:
    """Slots, tables, windows and compactor of one worker.

    Args:
        vllm_config: the engine's configuration.
        config: the engine's policies.
        model: the loaded model.
        layers: its attention layers in model order; each learns its index and this
            object.
        device: where the model runs.

    Attributes:
        batch_request_ids: returns the requests of the current batch in row order; set
            by the worker mixin.
    """

    def __init__(
        self,
        vllm_config: Any,
        config: KVPolicyConfig,
        model: torch.nn.Module,
        layers: Sequence[Any],
        device: torch.device,
    ) -> None:
        self.config = config
        self.layers = list(layers)
        self.policies = {
            name: build(name, config.options_of(name)) for name in config.policies
        }
        self.needs: Needs = reduce(or_, (p.needs for p in self.policies.values()))
        first = self.layers[0]
        shape = first.num_heads, first.num_kv_heads, first.head_size
        for name, policy in self.policies.items():
            with refused_for({name: policy}):
                policy.check_model(len(self.layers), *shape)
        with refused_for(self.policies, lambda needs: needs.rope):
            self.rope = model_rope(model, first.head_size) if self.needs.rope else None
        self.limits = planner_limits(vllm_config, config)
        block_size = self.limits.block_size
        num_slots = vllm_config.scheduler_config.max_num_seqs
        num_global = max_global_blocks(vllm_config, config)
        self.slots = SlotTable(num_slots, num_global, block_size, device)
        self.selection = PageSelection.of_server(config, first, self.slots)
        self.is_captured = compat.captures_attention(vllm_config)
        self.tables = PhysicalTables.of_engine(self.slots, vllm_config)
        self._folded = None
        if config.is_ragged:
            is_final = self.is_captured or device.type != "cpu"
            rows, columns = self.tables.tables.shape if is_final else (0, 0)
            sizes = len(self.layers), first.num_kv_heads, rows, columns
            self._folded = FoldedTables.of_engine(*sizes, device, is_final)
        self.windows = QueryWindows.of_engine(
            self.limits, len(self.layers), first, vllm_config, device
        )
        self.remembered = self.needs.memory + (POSITIONS,) * self.needs.positions
        self.late = self._late_tables(num_global)
        with refused_for(self.policies, lambda needs: needs.signals):
            self.signals = TokenSignals.of_engine(
                self.needs.signals, model, len(self.layers), vllm_config, device
            )
        with refused_for(self.policies, lambda needs: needs.until):
            self.expiries = self._deciding(model, vllm_config)
        # Whether attention follows what tokens decided, and not only events.
        self.is_exact = self.needs.exact
        self.folder: Folder | None = None
        self.pool: PagePool
        self.memory: dict[str, SurvivorMemory]
        self.compactor: Compactor
        self.counters = WorkerCounters(vllm_config.instance_id, block_size)
        self.batch_request_ids: Callable[[], Sequence[str]] = tuple
        self._commands: StepCommands | None = None
        self._answers: list[Answer] = []
        for index, layer in enumerate(self.layers):
            layer.kv_policy = self
            layer.kv_policy_index = index

    def _late_tables(self, num_global: int) -> LateTables:
        """Return the sizes of what is made along with the KV cache.

        Args:
            num_global: most superblocks of survivors of one request.
        """
        block_size = self.limits.block_size
        page_bytes = self.selection.page_bytes if self.selection else 0
        if self.needs.until:
            page_bytes += Expiries.page_bytes_of(block_size)
        return LateTables(
            num_slots=self.slots.null_slot,
            num_heads=len(self.layers) * self.layers[0].num_kv_heads,
            block_size=block_size,
            max_global_blocks=num_global,
            max_local_tokens=self.config.recent_tokens + block_size - 1,
            num_memories=len(self.remembered),
            is_ragged=self.config.is_ragged,
            page_bytes=page_bytes,
        )

    def _deciding(self, model: torch.nn.Module, vllm_config: Any) -> Expiries | None:
        """Hook what decides while tokens are computed, None where nothing does."""
        found = [getattr(policy, "decider", None) for policy in self.policies.values()]
        deciders = [decider for decider in found if decider is not None]
        if not deciders:
            return None
        # Names that differ behind the admission share one.
        deciders[0].attach(model, self.layers, vllm_config, self.rope)
        return Expiries(
            deciders[0],
            self.config.sink_tokens,
            self.limits.block_size,
            self.layers[0].num_kv_heads,
            vllm_config.scheduler_config.max_num_batched_tokens,
            self.slots.device,
        )

    @property
    def side_bytes(self) -> int:
        """Bytes of device memory held before the KV cache is made; `late` says more."""
        held = [self.windows.rows, self.slots.global_blocks, self.tables, self.signals]
        if self._folded is not None:
            held.append(self._folded)
        if self.expiries is not None:
            held.append(self.expiries)
        return sum(each.nbytes for each in held)

    def bind(self, keys_are_columns: bool) -> None:
        """Take hold of the KV caches, once vLLM has made them.

        Args:
            keys_are_columns: see `worker.pages.PagePool`.
        """
        self.pool = PagePool(
            [layer.kv_cache for layer in self.layers], keys_are_columns
        )
        for index, layer in enumerate(self.layers):
            check_layout(layer, self.pool, index)
        self.memory = {
            name: SurvivorMemory(
                slots=self.slots,
                num_blocks=self.pool.num_blocks,
                num_heads=self.late.num_heads,
                max_local_tokens=self.late.max_local_tokens,
            )
            for name in self.remembered
        }
        if self.expiries is not None:
            self.expiries.bind(self.pool)
        if self.selection is not None:
            self.selection.bind(self.pool)
        trace_dir = self.config.trace_dir
        self.compactor = Compactor(
            policies=self.policies,
            pool=self.pool,
            layout=self._layout(),
            slots=self.slots,
            windows=self.windows,
            memory=self.memory,
            signals=self.signals,
            rope=self.rope,
            tracer=Tracer(trace_dir, self.limits.block_size) if trace_dir else None,
            scale=self.layers[0].impl.scale,
            expiries=self.expiries,
            selection=self.selection,
        )

    def _layout(self) -> Layout:
        if self._folded is None:
            return EqualLayout(self.slots, self.pool)
        block = torch.zeros(1, 1, dtype=torch.int64, device=self.slots.device)
        if not self.pool.spans_layers:
            logger.warning(
                "KV policy: layers lie in allocations of their own, so pages cannot "
                "change layers; a request holds the maximum over layers of what its "
                "heads need"
            )
        tables = HeadTables(
            num_slots=self.slots.null_slot,
            max_global_blocks=self.late.global_blocks(self.pool.num_blocks),
            own_page=self.pool.own_pages(block).flatten(),
            stride=self.pool.num_heads,
            device=self.slots.device,
        )
        self.folder = Folder(self.slots, tables, self._folded)
        return RaggedLayout(self.slots, self.pool, tables)

    def rehearse(self, max_model_len: int) -> None:
        """Carry out events on the empty cache, so that their kernels are compiled.

        Those of a step, too: its tables and the saving of its queries.

        Args:
            max_model_len: longest request, in tokens.
        """
        quiet = replace(self.compactor, tracer=None)
        most, block_size = self.slots.null_slot, self.limits.block_size
        sizes = most, block_size, self.pool.num_blocks, max_model_len
        for events in rehearsals(self.config, *sizes):
            quiet.run(events)
        self.slots.drop(NAMES)
        self.signals.drop(NAMES)
        row = to_device([self.slots.null_slot], self.slots.device)
        nothing = torch.zeros(1, 1, dtype=torch.int32, device=self.slots.device)
        if self.folder is None:
            self.tables.fill(row, nothing, nothing[0], 1)
        else:
            self.folder.rehearse(self.tables.tables.shape[1])
            if self.selection is not None:
                self.selection.rehearse()
        self.windows.rehearse()

    def begin_step(self, commands: StepCommands, gone: Sequence[str]) -> None:
        """Run the step's events; the forward pass may follow.

        Args:
            commands: what the scheduler attached to its output.
            gone: requests that finished or were preempted before this step.
        """
        self.slots.drop(gone)
        self.signals.drop(gone)
        if self.folder is not None:
            moved = {event.request_id for event in commands.events}
            self.folder.forget(moved.union(gone))
        if commands.events:
            started = time.perf_counter()
            self._answers += self.compactor.run(commands.events)
            seconds = time.perf_counter() - started
            self.counters.add_events(len(commands.events), seconds)
            # What the others keep is known when their answers are here.
            self.counters.add_tokens(
                (event, len(event.source_blocks), len(event.dest_blocks))
                for event in commands.events
                if not self.policies[event.policy].dynamic
            )
        self._commands = commands

    def take_answers(self) -> Callable[[], tuple[UsedBlocks, ...]] | None:
        """Return what the scheduler has to hear about events, once; None for nothing.

        It is under way to the host: calling what is returned waits for it.
        """
        answers, self._answers = self._answers, []
        return partial(self._read, answers) if answers else None

    def _read(self, answers: Sequence[Answer]) -> tuple[UsedBlocks, ...]:
        found = [each for answer in answers for each in answer.read()]
        self.counters.add_tokens(found)
        return tuple(
            UsedBlocks(event.request_id, event.serial, used) for event, _, used in found
        )

    def end_step(self) -> None:
        """Collect what the step measured and forget it.

        Metadata built outside a step is stock.
        """
        self.signals.collect()
        self._commands = None
        self.windows.forget_plan()
        if self.expiries is not None:
            self.expiries.forget_plan()

    def plan_measurements(self, metadata: Any) -> None:
        """Note what to save of this step's forward pass: queries and signals.

        Args:
            metadata: vLLM's CommonAttentionMetadata of this KV cache group.
        """
        if self._commands is None:
            return
        request_ids = self.batch_request_ids()
        self.signals.plan(request_ids, metadata)
        if self.expiries is not None:
            self.expiries.plan(metadata)
        if self._commands.captures:
            query_start = metadata.query_start_loc_cpu.numpy()
            self.windows.plan(self._commands.captures, request_ids, query_start)

    def observe(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Save what was noted; called by the attention of each layer.

        Args:
            layer: index of the layer in model order.
            query: [T, Hq, D] model dtype, post-RoPE.
            key: [T, H, D] model dtype, post-RoPE.
            value: [T, H, D] model dtype.
        """
        self.windows.capture(layer, query)
        self.signals.observe(layer, key, value)
        if self.expiries is not None:
            self.expiries.write(layer, key)

    def folded(self, metadata: Any) -> FoldedBatch | SelectedBatch | None:
        """Return the step's page tables per head, None where the stock ones do.

        Those do on a server whose heads hold equally many tokens, and, where no graph
        may be captured or replayed, outside a step and before any request has had an
        event.
        """
        is_stock = self._commands is None or not (len(self.slots) or self.is_exact)
        is_replayed = self.is_captured and metadata.max_query_len == 1
        if self.folder is None or (is_stock and not is_replayed):
            return None
        request_ids = () if self._commands is None else self.batch_request_ids()
        held = self.folder.fold(metadata, request_ids)
        if self.is_exact and self.expiries is not None and self._commands is not None:
            exempt = self._commands.exempt
            held = replace(held, ends=self.expiries.ends(metadata, request_ids, exempt))
        if self.selection is None:
            return held
        return self.selection.narrow(metadata, request_ids, held)

    def physical(self, metadata: Any) -> Any:
        """Return the attention metadata with physical tables and lengths.

        Positions, slot mapping and query layout stay logical. The metadata is returned
        as it is where heads have tables of their own. It is, too, outside a step and
        before any request has had an event, unless a graph may be captured or replayed:
        that always reads our tables.

        Args:
            metadata: vLLM's CommonAttentionMetadata of this KV cache group.
        """
        is_stock = self._commands is None or not len(self.slots)
        if self.folder is not None or (is_stock and not self.is_captured):
            return metadata
        request_ids = () if self._commands is None else self.batch_request_ids()
        rows_host = self.slots.rows(request_ids, metadata.num_reqs)
        upper, max_seq_len = metadata.seq_lens_cpu_upper_bound, metadata.max_seq_len
        if not is_stock:
            held = upper.numpy() - self.slots.dropped_tokens_cpu[rows_host]
            upper = torch.from_numpy(np.ascontiguousarray(held))
            max_seq_len = int(held.max())
        tables, lengths = self.tables.fill(
            to_device(rows_host, self.slots.device),
            metadata.block_table_tensor,
            metadata.seq_lens,
            width=-(-max_seq_len // self.limits.block_size),
        )
        return metadata.replace(
            block_table_tensor=tables,
            seq_lens=lengths,
            seq_lens_cpu_upper_bound=upper,
            max_seq_len=max_seq_len,
            _num_computed_tokens_cache=None,
        )
