"""Defines the serving scenarios: their requests and their servers."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from benchmarks.columns import RATIO_COLUMNS, TABLE_COLUMNS
from benchmarks.server import EngineSettings
from benchmarks.workload import (
    NULL_BLOCKS,
    Workload,
    block_bytes,
    draw_lengths,
    ordinary_token_ids,
    pool_blocks,
)
from vllm_kvpolicy.config_keys import ALWAYS

STOCK = "stock"
DEFAULT = "default"
AMPLE = "ample"
"""Names of the servers without a policy: stock at the policies' block size without
prefix caching; vLLM's defaults; stock with room for everything, for verification."""
NO_PREFIX_CACHING = "--no-enable-prefix-caching"
AMPLE_SHARE = 2.0
SHORTEST_PROMPT_TOKENS, LONGEST_PROMPT_TOKENS = 40, 300


@dataclass(frozen=True)
class Scenario:
    """One comparison; lengths are in tokens.

    Attributes:
        name: `pressure`, `ragged` or `neutral`.
        policies: names for `--kv-policy`; each has a server of that name.
        budget: `--kv-budget`; None for a budget that is never reached.
        pool_share: usable blocks / blocks that stock needs for all at full length.
        block_size: tokens per block, for policies and stock.
        baselines: servers that all policies are compared with. What stock with room for
            everything (`ample`) reaches is the ceiling of a policy that costs nothing.
    """

    columns: ClassVar = TABLE_COLUMNS
    ratio_columns: ClassVar = RATIO_COLUMNS

    name: str
    policies: tuple[str, ...]
    pairs: int
    requests: int
    output_tokens: int
    budget: int | None
    interval: int = 64
    pool_share: float = AMPLE_SHARE
    block_size: int = 32
    max_model_len: int = 2048
    max_num_seqs: int = 16
    seed: int = 0
    baselines: tuple[str, ...] = (STOCK, DEFAULT)

    @property
    def is_pressed(self) -> bool:
        """Whether the pool is too small for all requests at full length."""
        return self.pool_share < 1

    @property
    def comparisons(self) -> list[tuple[str, str]]:
        """Policy and baseline of each ratio, and `ample` / stock, the ceiling."""
        ceiling = [(AMPLE, STOCK)] if AMPLE in self.baselines else []
        return ceiling + [
            (policy, baseline)
            for policy in self.policies
            for baseline in self.baselines
            if policy != baseline
        ]

    def workload(self, model: Path) -> Workload:
        """Return the requests.

        Raises:
            ValueError: a request is longer than `max_model_len`.
        """
        lengths = draw_lengths(
            self.requests, SHORTEST_PROMPT_TOKENS, LONGEST_PROMPT_TOKENS, self.seed
        )
        longest = max(lengths) + self.output_tokens
        if longest > self.max_model_len:
            raise ValueError(
                f"max_model_len: got {self.max_model_len}, expected at least {longest} "
                "for the longest request"
            )
        return Workload(
            token_ids=ordinary_token_ids(model),
            prompt_tokens=tuple(lengths),
            output_tokens=self.output_tokens,
            seed=self.seed,
        )

    def pool(self, workload: Workload, share: float) -> int:
        """Return the number of blocks of a pool, vLLM's null block included.

        Raises:
            ValueError: stock could not start, because the pool does not hold one
                request of `max_model_len`.
        """
        blocks = pool_blocks(
            workload.prompt_tokens, self.output_tokens, self.block_size, share
        )
        longest = -(-self.max_model_len // self.block_size)
        if blocks - NULL_BLOCKS < longest:
            raise ValueError(
                f"max_model_len: {self.max_model_len} tokens take {longest} blocks, "
                f"the pool has {blocks - NULL_BLOCKS}; expected a smaller one"
            )
        return blocks

    def servers(self, model: Path, workload: Workload) -> dict[str, list[str]]:
        """Return server name -> arguments of `vllm serve`; policies come first."""
        blocks = self.pool(workload, self.pool_share)
        settings = self._settings(model, blocks)
        common = settings.arguments()
        budget = self.max_model_len if self.budget is None else self.budget
        servers = {}
        for policy in self.policies:
            words = ["--kv-policy", policy, "--kv-budget", str(budget)]
            words += ["--kv-interval", str(self.interval), "--kv-events", ALWAYS]
            servers[policy] = [*common, *words, NO_PREFIX_CACHING]
        servers[STOCK] = [*common, NO_PREFIX_CACHING]
        if DEFAULT in self.baselines:
            # As many bytes, cut into blocks of vLLM's own choice.
            of_vllm = replace(settings, block_size=None, blocks=None)
            servers[DEFAULT] = of_vllm.arguments()
        if AMPLE in self.baselines:
            servers[AMPLE] = self.ample_server(model, workload)
        return servers

    def checked_servers(self, model: Path, workload: Workload) -> dict[str, list[str]]:
        """Return servers of the verification alone: stock with room for everything."""
        if not self.is_pressed or AMPLE in self.baselines:
            return {}
        return {AMPLE: self.ample_server(model, workload)}

    def ample_server(self, model: Path, workload: Workload) -> list[str]:
        """Return the arguments of stock with room for everything."""
        blocks = self.pool(workload, AMPLE_SHARE)
        return [*self._settings(model, blocks).arguments(), NO_PREFIX_CACHING]

    def _settings(self, model: Path, blocks: int) -> EngineSettings:
        return EngineSettings(
            model=str(model),
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            kv_cache_bytes=blocks * block_bytes(model, self.block_size),
            seed=self.seed,
            block_size=self.block_size,
            blocks=blocks,
        )


SCENARIOS = {
    "pressure": Scenario(
        name="pressure",
        policies=("streaming", "ams-tova"),
        pairs=3,
        requests=8,
        output_tokens=1000,
        budget=128,
        pool_share=0.5,
        baselines=(STOCK, DEFAULT, AMPLE),
    ),
    "ragged": Scenario(
        name="ragged",
        policies=("snapkv", "adakv-snapkv", "hard-snapkv"),
        pairs=9,
        requests=8,
        output_tokens=1000,
        budget=128,
        pool_share=0.5,
        baselines=("snapkv", STOCK),
    ),
    "neutral": Scenario(
        name="neutral",
        policies=("ams-tova",),
        pairs=9,
        requests=8,
        output_tokens=200,
        budget=None,
    ),
}
