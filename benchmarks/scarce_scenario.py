"""Defines the scenarios in which a KV cache of so many bytes is too small.

What does a policy give beside stock vLLM, and beside stock with a KV cache in FP8, if
all get the same bytes? Nothing sets a number of blocks: a policy's tables come off its
bytes, and stock is as vLLM starts it, with prefix caching and blocks of its own choice.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from benchmarks.caching_scenarios import CachingScenario, named
from benchmarks.columns import SCARCE_COLUMNS, SCARCE_RATIOS
from benchmarks.scenarios import STOCK
from benchmarks.server import EngineSettings
from benchmarks.shared_prompts import Cached, SharedPrefixes
from benchmarks.workload import ordinary_token_ids

FP8 = "stock-fp8"
"""Name of the server without a policy that keeps keys and values in FP8."""
FP8_WORDS = ["--kv-cache-dtype", "fp8"]


@dataclass(frozen=True)
class Scarce(CachingScenario):
    """Requests at once that have nothing in common, and bytes for a share of them.

    With SmolLM2 135M on two CPU cores a round of `scarce` takes a server about a
    minute: one run of five servers (start, verification, a round that does not count
    and 3 timed ones) takes half an hour, and each share more as long again. A server
    that does not start is named in the report and the record, with its error. `long`
    has longer answers, and events that are called when the pool runs short; a round
    takes a server of the packaged model 50 seconds. Ask for one share at a time.

    Attributes:
        policies: behind a name `fp8` is keys and values in FP8.
        shares: of the bytes that all requests at once need at full length, in blocks of
            `block_size`. Stock's blocks are larger on a CPU (128 tokens): with requests
            of 800 tokens it has room for all from 1.13 on.
        block_size: tokens per block of the policies' servers.
        max_num_seqs: most requests in one engine step; None for vLLM's default.
    """

    columns: ClassVar = SCARCE_COLUMNS
    ratio_columns: ClassVar = SCARCE_RATIOS
    lengths: ClassVar = ("--prompt-tokens", "--output-tokens")
    may_fail: ClassVar = True
    words: ClassVar = (*CachingScenario.words, "fp8")

    policies: tuple[str, ...] = ("ams-tova", "snapkv", "streaming")
    output_tokens: int = 600
    budget: int = 256
    shares: tuple[float, ...] = (0.4,)
    block_size: int = 32
    max_model_len: int | None = 2048
    dtype: str = "bfloat16"
    requests: int = 16
    prompt_tokens: int = 200
    max_num_seqs: int | None = None

    @property
    def compares_tokens(self) -> bool:
        """No: other blocks, and FP8, add up to other last bits."""
        return False

    @property
    def baselines(self) -> tuple[str, ...]:
        """Kinds of servers without a policy."""
        return (*super().baselines, FP8)

    @property
    def comparisons(self) -> list[tuple[str, str]]:
        """Server and baseline of each ratio, at equal shares."""
        pairs = [(policy, base) for policy in self.policies for base in self.baselines]
        return [
            (named(kind, share), named(base, share))
            for share in self.shares
            for kind, base in [*pairs, (FP8, STOCK)]
        ]

    def kinds(self) -> dict[str, list[str]]:
        """Return kind of server -> arguments that only it has; policies come first."""
        kinds = super().kinds()
        for label in self.policies:
            kinds[label] += ["--block-size", str(self.block_size)]
            kinds[label] += FP8_WORDS if "fp8" in label.split(":") else []
        return kinds | {FP8: FP8_WORDS}

    def settings(
        self, model: Path, workload: Cached, blocks: int, max_model_len: int
    ) -> EngineSettings:
        """Return what all servers of one share have in common; see CachingScenario.

        The bytes decide how many blocks there are.
        """
        found = super().settings(model, workload, blocks, max_model_len)
        own = {"block_size": None, "blocks": None, "max_num_seqs": self.max_num_seqs}
        return replace(found, **own)

    def workload(self, model: Path) -> SharedPrefixes:
        """Return the requests: as many prefixes, and nothing behind them."""
        return SharedPrefixes(
            token_ids=ordinary_token_ids(model),
            prefixes=self.requests,
            prefix_tokens=self.prompt_tokens,
            suffix_tokens=0,
            output_tokens=self.output_tokens,
            requests=self.requests,
            at_once=self.requests,
            seed=self.seed,
            counts_up=True,
        )


SCARCE_SCENARIOS = {
    "scarce": Scarce(name="scarce"),
    "long": Scarce(
        name="long",
        policies=("ams-tova", "ams-tova:pressure", "ams-tova:pressure:fp8"),
        output_tokens=4000,
        budget=384,
        interval=192,
        max_model_len=None,
        requests=8,
    ),
}
