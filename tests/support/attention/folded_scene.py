"""Attention layers whose heads have lengths of their own, and who holds what.

Layers lie in one allocation. Events left every (layer, KV head) another number of
pages, which may belong to any layer and head of what the request held. Each step goes
through the package's runtime, metadata builder and implementation, as in an engine;
queries are a part of the rows that a model's projection returns. What each head holds
is known beside all that, from plain lists.
"""

from collections.abc import Sequence
from copy import copy
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.v1.attention.backend import CommonAttentionMetadata

from support.attention.scene import POISON, Layers, Request, Shape
from vllm_kvpolicy.config import CONFIG_KEY, KVPolicyConfig
from vllm_kvpolicy.config_values import own_config
from vllm_kvpolicy.protocol import StepCommands
from vllm_kvpolicy.worker.setup import WorkerSetup
from vllm_kvpolicy.worker.transfer import to_device

LAYERS = 2
NAMES = [f"model.layers.{layer}.self_attn.attn" for layer in range(LAYERS)]
POLICY = {"policy": "identity", "policy_config": {"ragged": True}}
Pair = tuple[torch.Tensor, torch.Tensor]


class FoldedScene(Layers):
    """Two layers, their cache and the runtime of a worker; see the module.

    Args:
        padding: rows behind the requests that belong to nobody; the others as `Layers`.

    Attributes:
        qkv: [L, T + padding, (H * G + 2 * H) * D] of the step's tokens.
        counts: global pages [L, H] of each request, None without an event.
        held: keys and values [t, D] of each request, layer and head.
    """

    def __init__(
        self,
        backend: Any,
        vllm_config: Any,
        shape: Shape,
        batch: Sequence[Request],
        padding: int,
        device: torch.device,
        seed: int,
    ) -> None:
        super().__init__(backend, vllm_config, shape, batch, device, seed)
        self.padding = padding
        self.num_tokens = sum(request.queries for request in batch)
        self.names = [str(number) for number in range(len(batch))]
        self._start()
        width = (shape.heads * shape.group + 2 * shape.heads) * shape.dim
        self.qkv = self.draw(LAYERS, self.num_tokens + padding, width)
        self.counts: list[torch.Tensor | None] = []
        self.held = [self._fill(number) for number in range(len(batch))]

    def _start(self) -> None:
        """Make layers, runtime, cache and builder, in the order of a worker."""
        shape, device = self.shape, self.device
        # Of this scene alone: builders ask it for the policy.
        self.config = copy(self.config)
        self.config.additional_config = {CONFIG_KEY: POLICY}
        with set_current_vllm_config(self.config):
            self.layers = [self.make_layer(name) for name in NAMES]
            policy = KVPolicyConfig.from_dict(POLICY)
            model = torch.nn.Module()
            setup = WorkerSetup(self.config, policy, model, self.layers, device)
            self.builder = self.make_builder(NAMES)
        assert own_config(self.config).is_ragged  # FlashAttention's builder asks it
        size = (LAYERS, self.num_blocks, shape.heads, shape.block, 2 * shape.dim)
        self.cache = torch.zeros(size, dtype=shape.dtype, device=device)
        for layer, cache in zip(self.layers, self.cache, strict=True):
            layer.kv_cache = cache
        self.runtime = setup.bind(self.backend.keys_are_columns)
        self.runtime.batch_request_ids = lambda: self.names
        self.cache.fill_(POISON)

    # -- what the requests hold --------------------------------------------------------

    def parts(self, layer: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return query [T + padding, H * G, D], key and value of the step, as views."""
        shape = self.shape
        heads = (shape.heads * shape.group, shape.heads, shape.heads)
        split = self.qkv[layer].split([count * shape.dim for count in heads], dim=-1)
        query, key, value = (
            part.view(-1, count, shape.dim)
            for part, count in zip(split, heads, strict=True)
        )
        return query, key, value

    def _fill(self, number: int) -> list[list[Pair]]:
        """Write a request's tokens, carry out its event; return what it holds."""
        tokens = [self._tokens(number, layer) for layer in range(LAYERS)]
        self.counts.append(None)
        if self.batch[number].frontier:
            return self._cut(number, tokens)
        heads = range(self.shape.heads)
        return [[(keys[:, h], values[:, h]) for h in heads] for keys, values in tokens]

    def _tokens(self, number: int, layer: int) -> Pair:
        """Write all tokens of a request; return keys and values [t, H, D]."""
        request, shape = self.batch[number], self.shape
        start = self.starts()[number]
        past = request.computed - request.queries
        _, *now = (p[start : start + request.queries] for p in self.parts(layer))
        keys, values = (
            torch.cat([self.draw(past, shape.heads, shape.dim), part]) for part in now
        )
        attention = self.layers[layer]
        self.write(number, attention, attention.kv_cache, keys, values)
        return keys, values

    def _cut(self, number: int, tokens: list[Pair]) -> list[list[Pair]]:
        """Leave every head tokens of its own, on pages drawn from all of them."""
        request, size = self.batch[number], self.shape.block
        below = self.rows[number][: request.frontier]
        num_heads = LAYERS * self.shape.heads
        drawn = [self.rng.randint(0, request.frontier) for _ in range(num_heads)]
        drawn[self.rng.randrange(num_heads)] = 0
        drawn[(drawn.index(0) + 1) % num_heads] = request.frontier
        pool = self.runtime.compactor.pool
        stock = pool.own_pages(torch.tensor([below], device=self.device))
        pages = stock.flatten().tolist()
        self.rng.shuffle(pages)
        self.cache[:, below] = POISON
        first, held = 0, []
        local = range(request.frontier * size, request.computed)
        for head, count in enumerate(drawn):
            keys, values = (
                side[:, head % self.shape.heads]
                for side in tokens[head // self.shape.heads]
            )
            chosen = sorted(self.rng.sample(range(local.start), count * size))
            own = pages[first : first + count]
            first += count
            pool.keys[0][own] = keys[chosen].unflatten(0, (count, size))
            pool.values[0][own] = values[chosen].unflatten(0, (count, size))
            chosen += local
            held.append((keys[chosen], values[chosen]))
        self._note(number, drawn, pages, below)
        return [held[: self.shape.heads], held[self.shape.heads :]]

    def _note(
        self, number: int, drawn: list[int], pages: list[int], dest: list[int]
    ) -> None:
        """Tell the runtime's tables about an event: pages of heads in order.

        Args:
            dest: superblocks that have these pages.
        """
        slots, tier = self.runtime.requests, self.runtime.tier
        slot, frontier = slots.take(self.names[number]), self.batch[number].frontier
        slots.skip[slot] = slots.skip_cpu[slot] = frontier
        slots.frontier_blocks_cpu[slot] = frontier
        counts = torch.tensor(drawn, device=self.device)
        first = torch.cat([counts.new_zeros(1), counts.cumsum(0)])[None]
        listed = torch.tensor([pages], device=self.device)
        owned = torch.tensor([dest], device=self.device)
        slots.global_blocks[slot, : len(dest)] = owned[0].int()
        index = to_device([slot], self.device)
        tier.lists.update([slot], index, owned, first, listed)
        tier.tables.forget([self.names[number]])
        self.counts[number] = counts.view(LAYERS, -1)

    # -- a step ------------------------------------------------------------------------

    def build(self) -> Any:
        """Return the metadata of the step, as a worker builds it."""
        self.runtime.begin(StepCommands((), ()), ())
        ends = [request.computed for request in self.batch] + [0] * self.padding
        starts = self.starts() + [self.num_tokens] * self.padding
        columns = max(map(len, self.rows)) + 2
        stale = [self.rng.randrange(self.num_blocks) for _ in range(columns)]
        table = [row + stale[len(row) :] for row in [*self.rows, *[[]] * self.padding]]
        longest = max(request.queries for request in self.batch)
        return self._built(self._common(starts, ends, table, longest, max(ends)))

    def build_empty(self) -> Any:
        """Return metadata of a batch of this size as a graph is captured with it.

        No request is there, every row has one token, and the longest is what a server
        allows.
        """
        self.runtime.end()
        count, longest = len(self.batch) + self.padding, self.config.model_config
        starts, ones = list(range(count + 1)), [1] * count
        table = [[0] * -(-longest.max_model_len // self.shape.block)] * count
        return self._built(
            self._common(starts, ones, table, 1, longest.max_model_len),
            self.builder.build_for_cudagraph_capture,
        )

    def _common(
        self,
        starts: list[int],
        ends: list[int],
        table: list[list[int]],
        max_query_len: int,
        max_seq_len: int,
    ) -> CommonAttentionMetadata:
        query_start = torch.tensor(starts, dtype=torch.int32)
        upper = torch.tensor(ends, dtype=torch.int32)
        num_tokens = len(self.qkv[0])
        return CommonAttentionMetadata(
            query_start_loc=query_start.to(self.device),
            query_start_loc_cpu=query_start,
            seq_lens=upper.clone().to(self.device),
            seq_lens_cpu_upper_bound=upper,
            max_seq_len=max_seq_len,
            num_reqs=len(ends),
            num_actual_tokens=num_tokens,
            max_query_len=max_query_len,
            block_table_tensor=torch.tensor(table, dtype=torch.int32).to(self.device),
            slot_mapping=torch.zeros(num_tokens, dtype=torch.int64, device=self.device),
            causal=True,
        )

    def _built(self, common: CommonAttentionMetadata, build: Any = None) -> Any:
        with set_current_vllm_config(self.config):
            if build is not None:
                return build(common)
            return self.builder.build(0, common)

    def output(self) -> torch.Tensor:
        """Return room for what `forward` writes, nothing in it."""
        query = self.parts(0)[0]
        size = (LAYERS, *query.shape)
        return torch.full(size, POISON, dtype=query.dtype, device=self.device)

    def forward(self, built: Any, output: torch.Tensor) -> None:
        """Attend in every layer.

        Args:
            built: metadata of the step.
            output: [L, T + padding, H * G, D], mutated.
        """
        with set_current_vllm_config(self.config):
            for index, layer in enumerate(self.layers):
                parts = self.parts(index)
                cache, into = layer.kv_cache, output[index]
                layer.impl.forward(layer, *parts, cache, built, into)

    def attend(self) -> torch.Tensor:
        """Return [L, T, H * G, D] of vLLM's kernels, called as in a step."""
        output = self.output()
        self.forward(self.build(), output)
        return output[:, : self.num_tokens]
