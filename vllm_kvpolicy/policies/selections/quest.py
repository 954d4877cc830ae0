"""Quest: a decoding query reads the pages whose keys may match it best.

Per page and channel c the smallest and largest key, lo_c and hi_c, are known. No key of
the page has a larger product with a query q than

    sum_c max(q_c lo_c, q_c hi_c).

A page's score for a KV head is the maximum of that over the head's query heads. Pages
with the highest scores are read, as many as the budget has room for after the local
tokens, which are all read.

Source: Quest (arXiv 2406.10774) section 3; the budget that includes local tokens, and
the maximum over query heads, from WG-KV (arXiv 2512.17452) and its authors' code.
Deviations: all layers select (Quest leaves out the first two); Quest itself has no
local tokens but its newest page, and one choice per query head.
"""

import numpy as np
from pydantic import Field
from torch import Tensor

from vllm_kvpolicy.kernels.page_bounds import page_scores
from vllm_kvpolicy.policies.options import BaseOptions, Tokens
from vllm_kvpolicy.policies.words import Word


class Quest(Word):
    """Chooses pages by bounds on the keys in them."""

    summary = (
        "each generated token reads only the pages whose keys may match its query best"
    )
    source = "Quest, arXiv 2406.10774"
    ragged = True

    class Options(BaseOptions):
        quest_budget: Tokens = Field(
            1024,
            description="tokens per KV head that a decoding step reads, including "
            "local tokens",
        )

    def most_pages(self, local: np.ndarray, block_size: int) -> np.ndarray:
        """Return [S] int64 global pages that queries read at most.

        Args:
            local: [S] int64, local tokens that each query reads.
            block_size: N, tokens per page.
        """
        return -(-np.maximum(self.options.quest_budget - local, 0) // block_size)

    def scores(
        self, queries: Tensor, pages: Tensor, counts: Tensor, bounds: Tensor
    ) -> Tensor:
        """Return [R, C] float32; see `kernels.page_bounds.page_scores`."""
        return page_scores(queries, pages, counts, bounds)
