"""Tiers of either kind, with tables of their own."""

from vllm_kvpolicy.worker.pages import PagePool
from vllm_kvpolicy.worker.request_table import RequestTable
from vllm_kvpolicy.worker.tiers.equal import EqualTier, PhysicalTables
from vllm_kvpolicy.worker.tiers.head_tables import FoldedTables, HeadTables
from vllm_kvpolicy.worker.tiers.ragged import RaggedTier
from vllm_kvpolicy.worker.tiers.tier import Tier


def make_tier(
    is_ragged: bool,
    requests: RequestTable,
    pool: PagePool,
    rows: int = 0,
    columns: int = 0,
) -> Tier:
    """Return a tier; `rows` and `columns` of a step's tables are there at once."""
    if not is_ragged:
        tables = PhysicalTables(requests, rows, columns)
        return EqualTier(requests, pool, tables)
    own = pool.null_pages.flatten()
    lists = HeadTables(requests, pool.num_blocks, own, pool.num_heads)
    sizes = pool.num_layers, pool.num_heads, rows, columns
    room = FoldedTables(*sizes, requests.device)
    return RaggedTier(requests, pool, lists, room)
