"""Builds the worker's half of a policy in two phases, before and after the KV cache.

vLLM measures free memory between the two.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, reduce
from operator import or_
from typing import Any

import torch
from torch import nn

from vllm_kvpolicy import compat
from vllm_kvpolicy.config import KVPolicyConfig
from vllm_kvpolicy.kernels.rope import Rope
from vllm_kvpolicy.observe.metrics import LIVE, TRACE, WorkerCounters
from vllm_kvpolicy.observe.shared_files import own_engine
from vllm_kvpolicy.policies.base import LoadedModel, Needs, Policy
from vllm_kvpolicy.policies.compose import assemble
from vllm_kvpolicy.policies.model_files import ModelShape
from vllm_kvpolicy.policies.names import ResolvedPolicy
from vllm_kvpolicy.sizes import max_global_blocks, own_block_size, query_rows
from vllm_kvpolicy.worker.captures.capture import Capture
from vllm_kvpolicy.worker.captures.query_windows import QueryWindows
from vllm_kvpolicy.worker.captures.token_signals import TokenSignals
from vllm_kvpolicy.worker.captures.visible_until import VisibleUntil
from vllm_kvpolicy.worker.compaction import Compactor, remembered
from vllm_kvpolicy.worker.latents import in_latent_space, is_latent, watch
from vllm_kvpolicy.worker.layers import check_known, model_rope
from vllm_kvpolicy.worker.observers.live import LiveEvents
from vllm_kvpolicy.worker.observers.trace import Tracer
from vllm_kvpolicy.worker.pages import Float8, PagePool, check_layout
from vllm_kvpolicy.worker.request_table import RequestTable
from vllm_kvpolicy.worker.runtime import KVPolicyRuntime
from vllm_kvpolicy.worker.survivors import SurvivorMemory
from vllm_kvpolicy.worker.tensor_parallel import head_shard, ranks_of, trace_name
from vllm_kvpolicy.worker.tiers.equal import EqualTier, PhysicalTables
from vllm_kvpolicy.worker.tiers.head_tables import FoldedTables, HeadTables
from vllm_kvpolicy.worker.tiers.page_selection import PageSelection
from vllm_kvpolicy.worker.tiers.ragged import RaggedTier
from vllm_kvpolicy.worker.tiers.tier import Tier
from vllm_kvpolicy.worker.warmup import DummyEvents

# Kinds of side tables.
VALUES = "values of kept tokens"
PAGES = "decisions and bounds of pages"
LISTS = "page lists of heads"


@dataclass(frozen=True)
class SideTables:
    """Sizes of what a worker allocates when it knows the superblocks of the pool.

    Args:
        num_heads: n = L * H on this rank.
        max_local_tokens: most local tokens right after an event, per head.
        num_memories: values that are remembered of each survivor.
        page_bytes: bytes for each head page, of decisions and page bounds.
    """

    num_requests: int
    num_heads: int
    block_size: int
    max_local_tokens: int
    num_memories: int
    is_ragged: bool
    page_bytes: int = 0

    @classmethod
    def of_server(
        cls, vllm_config: Any, config: KVPolicyConfig, needs: Needs, num_heads: int
    ) -> "SideTables":
        """Return the sizes of a worker with `num_heads` KV heads in all its layers.

        Args:
            needs: of all its policies.
        """
        block_size = own_block_size(vllm_config)
        decisions = 4 * block_size if needs.until else 0  # an int32 for each slot
        bounds = PageSelection.page_bytes(config, vllm_config)
        return cls(
            num_requests=vllm_config.scheduler_config.max_num_seqs,
            num_heads=num_heads,
            block_size=block_size,
            max_local_tokens=config.recent_tokens + block_size - 1,
            num_memories=len(remembered(needs)),
            is_ragged=config.is_ragged,
            page_bytes=decisions + bounds,
        )

    def parts(self, num_blocks: int) -> dict[str, int]:
        """Return the bytes of each kind of these, with a pool of `num_blocks`.

        Values are float32, ids of pages and places in the lists of `HeadTables` int32.
        """
        local = self.num_requests * self.max_local_tokens
        values = self.num_heads * (num_blocks * self.block_size + local)
        # One more row is for requests without an event.
        starts = (self.num_requests + 1) * (self.num_heads + 1)
        pages = num_blocks * self.num_heads
        return {
            VALUES: self.num_memories * 4 * values,
            PAGES: pages * self.page_bytes,
            LISTS: self.is_ragged * 4 * (pages + starts),
        }

    def nbytes(self, num_blocks: int) -> int:
        """Return the bytes of all of `parts`."""
        return sum(self.parts(num_blocks).values())

    def pool_blocks(self, available: int, superblock_bytes: int) -> int:
        """Return how many superblocks fit together with these tables.

        Args:
            available: bytes for the KV cache and these tables together.
        """

        def total(num_blocks: int) -> int:
            return num_blocks * superblock_bytes + self.nbytes(num_blocks)

        most = max(available, 0) // superblock_bytes
        return max(bisect_right(range(most + 1), available, key=total) - 1, 0)


MIB = 2**20
SMALL = 0.01  # of the whole: smaller parts are not named


@dataclass(frozen=True)
class Share:
    """A part of the memory beside the KV cache."""

    what: str
    nbytes: int
    policies: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.what} {mib(self.nbytes)} for {', '.join(self.policies)}"


def mib(nbytes: float) -> str:
    """Return a number of bytes in MiB, below 1 MiB with three digits."""
    size = nbytes / MIB
    return f"{size:,.1f} MiB" if size >= 1 or not size else f"{size:.3g} MiB"


def too_small(
    available: int,
    superblocks: tuple[int, int],
    superblock_bytes: int,
    shares: Sequence[Share],
    enough: int,
) -> str:
    """Return the error of a pool in which not even one request fits.

    Args:
        available: bytes for the KV cache and what is beside it.
        superblocks: that fit, and that one request of --max-model-len may hold.
        superblock_bytes: of all layers.
        enough: bytes that would be.
    """
    beside = sum(share.nbytes for share in shares)
    named = [share for share in shares if share.nbytes > SMALL * beside]
    parts = "; ".join(map(str, sorted(named, key=lambda share: -share.nbytes)))
    fit, wanted = superblocks
    names = {name for share in shares for name in share.policies}
    allowed = "take policies out of `allow`, " if len(names) > 1 else ""
    return (
        f"KV cache memory: of {mib(available)}, --kv-policy takes {mib(beside)} for "
        f"tables ({parts}), and the other {mib(max(available - beside, 0))} hold {fit} "
        f"superblocks of {mib(superblock_bytes)}, expected at least {wanted + 1}: "
        f"{wanted} that one request of --max-model-len tokens may hold, and vLLM's "
        f"null block; give at least {mib(enough + MIB / 20)} (such as by "
        f"--kv-cache-memory-bytes), {allowed}lower --max-num-seqs for smaller tables, "
        "or lower --kv-budget, --kv-interval, prefill_interval or --max-model-len"
    )


class WorkerSetup:
    """What a worker holds before the KV cache exists; `bind` makes the runtime of it.

    Args:
        model: the loaded model, not yet compiled or captured, which captures hook.

    Raises:
        ValueError: a policy that cannot serve this model.
    """

    def __init__(
        self,
        vllm_config: Any,
        config: KVPolicyConfig,
        model: nn.Module,
        layers: Sequence[Any],
        device: torch.device,
    ) -> None:
        self.vllm_config, self.config, self.layers = vllm_config, config, list(layers)
        self.shard = head_shard(vllm_config, layers[0])
        self.policies = self._policies()
        needs = reduce(or_, (policy.needs for policy in self.policies.values()))
        self.needs = needs | Needs(positions=config.hints)
        self.rope = rope_for(self.policies, model, layers)
        sizes = self.needs, len(layers) * layers[0].num_kv_heads
        self.side_tables = SideTables.of_server(vllm_config, config, *sizes)
        self.requests = RequestTable(
            self.side_tables.num_requests,
            max_global_blocks(vllm_config, config),
            self.side_tables.block_size,
            device,
        )
        self.tables = self._step_tables()
        loaded = LoadedModel(model, layers, vllm_config, device, self.rope)
        self.captures = self._captures(loaded)
        self.ranks = ranks_of(self.shard, device)

    def _policies(self) -> dict[str, Policy]:
        """Return the server's policies by name, each for the heads of this rank."""
        policies, shard = {}, self.shard
        for name in self.config.policies:
            policy = assemble(self.config.resolved(name))
            with refused_for({name: policy}):
                heads = shard.num_heads, shard.num_kv_heads, self.layers[0].head_size
                policy.check_model(ModelShape(len(self.layers), *heads))
                policy.take_heads(shard)
            policies[name] = policy
        check_known(self.layers, self.vllm_config)
        return policies

    def _step_tables(self) -> PhysicalTables | FoldedTables:
        """Return what attention reads in a step; this is where the tier is chosen."""
        config, requests = self.vllm_config, self.requests
        num_rows = config.scheduler_config.max_num_seqs  # padding included
        num_columns = -(-config.model_config.max_model_len // requests.block_size)
        if not self.config.is_ragged:
            return PhysicalTables(requests, num_rows, num_columns)
        is_final = compat.captures_attention(config) or requests.device.type != "cpu"
        if not is_final:
            num_rows, num_columns = 0, 0
        heads = len(self.layers), self.layers[0].num_kv_heads
        return FoldedTables(*heads, num_rows, num_columns, requests.device, is_final)

    def _captures(self, model: LoadedModel) -> list[Capture]:
        """Return the captures that the policies need, hooked to the model."""
        captures, first = list[Capture](), model.layers[0]
        if self.needs.window_tokens:
            turn = partial(in_latent_space, model.layers) if is_latent(first) else None
            captures.append(
                QueryWindows(
                    query_rows(self.vllm_config),
                    model.step_tokens,
                    model.device,
                    compat.captures_attention(self.vllm_config),
                    turn,
                )
            )
        if self.needs.signals:
            with refused_for(self.policies, TokenSignals.serves):
                signals = TokenSignals(self.needs.signals, model)
                signals.attach(model.module)
            captures.append(signals)
        # Names that differ only after the admission share one decider.
        each = (getattr(policy, "decider", None) for policy in self.policies.values())
        decider = next(filter(None, each), None)
        if decider is not None:
            with refused_for(self.policies, VisibleUntil.serves):
                decider.attach(model)
            sizes = own_block_size(self.vllm_config), first.num_kv_heads
            steps = model.step_tokens, model.device
            sinks = self.config.sink_tokens
            captures.append(VisibleUntil(decider, sinks, *sizes, *steps))
        return captures

    @property
    def early_bytes(self) -> int:
        """Bytes of device memory that are held before the KV cache is made."""
        return sum(share.nbytes for share in self._early_shares())

    def shares(self, num_blocks: int, is_early_ours: bool) -> list[Share]:
        """Return what is beside a pool, and for which policies.

        Args:
            is_early_ours: `early_bytes` are taken from the same memory.
        """
        readers = {
            VALUES: self._those(
                lambda needs, own: remembered(needs) or self.config.hints
            ),
            PAGES: self._those(lambda needs, own: own.info.selection or needs.until),
            LISTS: self._those(lambda needs, own: own.is_ragged),
        }
        beside = self.side_tables.parts(num_blocks)
        later = [Share(kind, size, readers[kind]) for kind, size in beside.items()]
        return (self._early_shares() if is_early_ours else []) + later

    def _early_shares(self) -> list[Share]:
        is_folded = isinstance(self.tables, FoldedTables)
        shares = []
        for each in self.captures:
            needs = {name: policy.needs for name, policy in self.policies.items()}
            readers = tuple(name for name in needs if each.serves(needs[name]))
            shares.append(Share(each.holds, each.nbytes, readers))
        rows = self.requests.global_blocks.nbytes
        attending = self._those(lambda needs, own: own.is_ragged or not is_folded)
        return [
            *shares,
            Share("blocks of requests", rows, tuple(self.policies)),
            Share("page tables of a step", self.tables.nbytes, attending),
        ]

    def _those(
        self, wants: Callable[[Needs, ResolvedPolicy], object]
    ) -> tuple[str, ...]:
        """Return the names of policies by their needs and their configuration."""
        return tuple(
            name
            for name, policy in self.policies.items()
            if wants(policy.needs, self.config.resolved(name))
        )

    def bind(self, keys_are_columns: bool) -> KVPolicyRuntime:
        """Build the runtime over vLLM's KV caches and attach it to the layers.

        Args:
            keys_are_columns: see `worker.pages.PagePool`.
        """
        caches = [layer.kv_cache for layer in self.layers]
        float8, value_dim = Float8.of_layers(self.layers), None
        if is_latent(self.layers[0]):
            caches = [cache.unsqueeze(1) for cache in caches]
            value_dim = self.layers[0].kv_lora_rank
        pool = PagePool(caches, keys_are_columns, float8, value_dim)
        if pool.block_size != self.requests.block_size:
            raise RuntimeError(
                f"KV caches: got pages of {pool.block_size} tokens, expected "
                f"{self.requests.block_size}: this attention backend splits superblocks"
            )
        for index, layer in enumerate(self.layers):
            check_layout(layer, pool, index)
        for capture in self.captures:
            capture.bind(pool)
        counters = WorkerCounters(
            own_engine(self.vllm_config), pool.block_size, counts=not self.shard.rank
        )
        compactor = Compactor(
            policies=self.policies,
            pool=pool,
            tier=self._tier(pool),
            requests=self.requests,
            captures=self.captures,
            memory=SurvivorMemory(
                names=remembered(self.needs),
                requests=self.requests,
                num_blocks=pool.num_blocks,
                num_heads=self.side_tables.num_heads,
                max_local_tokens=self.side_tables.max_local_tokens,
            ),
            rope=self.rope,
            scale=self.layers[0].impl.scale,
            trace=self._trace(partial(counters.note_off, TRACE)),
            live=self._live(partial(counters.note_off, LIVE)),
            ranks=self.ranks,
            most_tokens=self.dummy_events(pool).most_tokens(),
            layers=self.layers,
        )
        runtime = KVPolicyRuntime(compactor, counters)
        for index, layer in enumerate(self.layers):
            layer.kv_policy_runtime = runtime
            layer.kv_policy_index = index
            if pool.is_latent:
                watch(layer, runtime.observe)
        return runtime

    def dummy_events(self, pool: PagePool) -> DummyEvents:
        """Return what a warm-up tries: batches of events may be as large."""
        most, sizes = self.requests.null_row, (pool.block_size, pool.num_blocks)
        longest = self.vllm_config.model_config.max_model_len  # vLLM may have cut it
        rows = query_rows(self.vllm_config)
        return DummyEvents(self.config, most, *sizes, longest, rows)

    def _trace(self, on_off: Callable[[], None]) -> Tracer | None:
        if not self.config.trace_dir:
            return None
        engine = self.vllm_config.parallel_config.data_parallel_index
        name = trace_name(self.shard, engine)
        sizes = self.config.trace_dir, self.requests.block_size
        return None if name is None else Tracer(*sizes, on_off, name=name)

    def _live(self, on_off: Callable[[], None]) -> LiveEvents | None:
        """Return what shows events; of heads with copies, the first rank shows them."""
        place, is_copy = divmod(self.shard.rank, self.shard.copies)
        if is_copy or not self.config.live:
            return None
        return LiveEvents(
            own_engine(self.vllm_config),
            place,
            self.shard.size // self.shard.copies,
            self.requests.block_size,
            (len(self.layers), self.layers[0].num_kv_heads),
            self.config.live_text,
            on_off,
        )

    def _tier(self, pool: PagePool) -> Tier:
        is_captured = compat.captures_attention(self.vllm_config)
        if isinstance(self.tables, PhysicalTables):
            return EqualTier(self.requests, pool, self.tables, is_captured)
        lists = HeadTables(
            self.requests,
            pool.num_blocks,
            own_page=pool.null_pages.flatten(),
            stride=pool.num_heads,
            ranks=self.ranks,
        )
        deciding = [each for each in self.captures if isinstance(each, VisibleUntil)]
        return RaggedTier(
            self.requests,
            pool,
            lists,
            self.tables,
            is_captured,
            PageSelection.of_server(self.config, self.layers[0], self.requests, pool),
            deciding[0] if self.needs.exact else None,
        )


@contextmanager
def refused_for(
    policies: Mapping[str, Policy], reads: Callable[[Needs], Any] = lambda needs: True
) -> Iterator[None]:
    """Add to a refusal the names of the policies that it concerns.

    Args:
        reads: returns from its needs whether a policy is concerned; by default all are.

    Raises:
        ValueError: the one raised inside, with the policies' names.
    """
    try:
        yield
    except ValueError as error:
        names = [name for name, policy in policies.items() if reads(policy.needs)]
        raise ValueError(
            f"kv_policy: {', '.join(names)} cannot run on this model: {error}; "
            "choose other policies, also in `allow`"
        ) from None


def rope_for(
    policies: Mapping[str, Policy], model: nn.Module, layers: Sequence[Any]
) -> Rope | None:
    """Return how layers of a model rotate, None if no policy asks for it.

    Args:
        layers: attention layers of full attention in it, in model order.

    Raises:
        ValueError: a rotary embedding of a kind that is not known, or that one of the
            policies cannot read.
    """
    needs = [policy.needs for policy in policies.values()]
    if not any(each.rope for each in needs):
        return None
    with refused_for(policies, lambda needs: needs.rope):
        rope = model_rope(model, layers)
    with refused_for(policies, lambda needs: needs.halves):
        if rope.order is not None and any(each.halves for each in needs):
            raise ValueError(
                "rotary positions: expected channels i and i + D/2 of each head to "
                "rotate as a pair, got a model with other pairs"
            )
    with refused_for(policies, lambda needs: needs.alike):
        if rope.of_layer is not None and any(each.alike for each in needs):
            raise ValueError(
                "rotary positions: expected all layers to rotate alike, got a model "
                "whose layers differ, or do not rotate"
            )
    return rope
