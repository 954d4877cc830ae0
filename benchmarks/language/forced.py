"""Makes vLLM decode tokens that are known, one by one, as if it had chosen them."""

from collections.abc import Sequence
from typing import Any

import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from benchmarks.language.engines import FORCED_KEY


class Forced(AdapterLogitsProcessor):
    """Leaves one token of each row; log-probabilities are those before it."""

    def is_argmax_invariant(self) -> bool:
        """It decides the most probable token."""
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Any:
        """Return what picks a request's next token; None without an answer."""
        answer: Sequence[int] | None = (params.extra_args or {}).get(FORCED_KEY)
        if answer is None:
            return None

        def pick(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            only = torch.full_like(logits, -torch.inf)
            only[answer[len(output_ids)]] = 0
            return only

        return pick
