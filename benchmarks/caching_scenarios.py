"""Defines the scenarios with prefix caching on, and those where prompts begin alike.

Policies are compared with stock as vLLM starts it, which caches prefixes. Each pool
share has a server of every kind, named `policy@share` and `stock@share`.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from benchmarks.columns import PREFIX_TTFT, TURN_TTFT, caching_columns, caching_ratios
from benchmarks.scenarios import NO_PREFIX_CACHING, STOCK
from benchmarks.server import EngineSettings
from benchmarks.shared_prompts import Cached, Conversations, SharedPrefixes
from benchmarks.workload import (
    NULL_BLOCKS,
    block_bytes,
    model_config,
    ordinary_token_ids,
)
from vllm_kvpolicy.config_keys import ALWAYS, PRESSURE

UNCACHED = "uncached"
"""Name of the server without a policy and without prefix caching."""


@dataclass(frozen=True)
class CachingScenario:
    """What scenarios with prefix caching share; lengths are in tokens.

    Attributes:
        name: `prefixes`, `turns`, `scarce` or `long`.
        policies: names for `--kv-policy`, each with `words` behind it, joined by `:`;
            each has a server for every share.
        output_tokens: forced length of each output, thinking included.
        shares: usable blocks / blocks that all requests at once need at full length if
            they share none.
        block_size: tokens per block, for policies and stock.
        max_model_len: the same for all servers; None for the longest request.
        dtype: of weights, keys and values.
        policy_config: `--kv-policy-config`, JSON; empty for none.
        uncached: also compare with stock without prefix caching.
    """

    lengths: ClassVar[tuple[str, ...]]
    """Options with which requests become shorter."""
    may_fail: ClassVar[bool] = False
    """Whether a server that does not start is a result, in place of an error."""
    words: ClassVar[tuple[str, ...]] = (PRESSURE, "pin")
    """What may follow a policy: events on call, and prompts that stay."""

    name: str
    policies: tuple[str, ...] = ("ams-tova",)
    pairs: int = 3
    output_tokens: int = 64
    budget: int = 512
    interval: int = 128
    shares: tuple[float, ...] = (1.0, 0.4)
    block_size: int = 32
    max_model_len: int | None = None
    dtype: str = "float32"
    policy_config: str = ""
    uncached: bool = False
    seed: int = 0

    @property
    def compares_tokens(self) -> bool:
        """Whether servers without a policy give the same tokens."""
        return self.dtype == "float32"

    @property
    def baselines(self) -> tuple[str, ...]:
        """Kinds of servers without a policy."""
        return (STOCK, UNCACHED) if self.uncached else (STOCK,)

    @property
    def comparisons(self) -> list[tuple[str, str]]:
        """Policy and baseline of each ratio.

        Each policy is compared at equal shares, and with stock that has the most.
        """
        found = []
        for policy in self.policies:
            for share in self.shares:
                others = [named(kind, share) for kind in self.baselines]
                most = named(STOCK, max(self.shares))
                others += [most] * (most not in others)
                found += [(named(policy, share), other) for other in others]
        return found

    def servers(self, model: Path, workload: Cached) -> dict[str, list[str]]:
        """Return server name -> arguments of `vllm serve`; policies come first.

        Raises:
            ValueError: a request is too long for the model or the smallest pool.
        """
        max_model_len = self._model_len(model, workload.longest)
        servers = {}
        for kind, words in self.kinds().items():
            for share in self.shares:
                blocks = self.pool(workload, share, max_model_len)
                settings = self.settings(model, workload, blocks, max_model_len)
                servers[named(kind, share)] = settings.arguments() + words
        return servers

    def kinds(self) -> dict[str, list[str]]:
        """Return kind of server -> arguments that only it has; policies come first.

        Raises:
            ValueError: an unknown word behind a policy.
        """
        common = ["--kv-budget", str(self.budget), "--kv-interval", str(self.interval)]
        if self.policy_config:
            common += ["--kv-policy-config", self.policy_config]
        kinds = {}
        for label in self.policies:
            name, *words = label.split(":")
            if unknown := sorted({*words} - {*self.words}):
                expected = " or ".join(map(repr, self.words))
                raise ValueError(
                    f"policies: got {label}, expected {expected} behind the name, not "
                    f"{unknown}"
                )
            events = PRESSURE if PRESSURE in words else ALWAYS
            kinds[label] = ["--kv-policy", name, *common, "--kv-events", events]
            kinds[label] += ["--kv-pin", "prompt"] if "pin" in words else []
        kinds[STOCK] = []
        if self.uncached:
            kinds[UNCACHED] = [NO_PREFIX_CACHING]
        return kinds

    def settings(
        self, model: Path, workload: Cached, blocks: int, max_model_len: int
    ) -> EngineSettings:
        """Return what all servers of one share have in common.

        Args:
            blocks: of the pool, vLLM's null block included.
        """
        return EngineSettings(
            model=str(model),
            max_model_len=max_model_len,
            max_num_seqs=workload.at_once,
            kv_cache_bytes=blocks * block_bytes(model, self.block_size, self.dtype),
            seed=self.seed,
            dtype=self.dtype,
            block_size=self.block_size,
            blocks=blocks,
        )

    def checked_servers(self, *_: object) -> dict[str, list[str]]:
        """Return servers of the verification alone: none."""
        return {}

    def pool(self, workload: Cached, share: float, max_model_len: int) -> int:
        """Return the number of blocks of a pool, vLLM's null block included.

        Raises:
            ValueError: it does not hold one request of `max_model_len`.
        """
        blocks = int(workload.needed_blocks(self.block_size) * share)
        longest = -(-max_model_len // self.block_size)
        if blocks < longest:
            raise ValueError(
                f"shares: {share:g} is {blocks} blocks, expected at least {longest} "
                f"for one request of {max_model_len} tokens"
            )
        return blocks + NULL_BLOCKS

    def _model_len(self, model: Path, longest: int) -> int:
        """Return `--max-model-len`; raise ValueError if it is too short or too long."""
        found = longest if self.max_model_len is None else self.max_model_len
        most = model_config(model)["max_position_embeddings"]
        if not longest <= found <= most:
            raise ValueError(
                f"max_model_len: got {found}, expected {longest} for the longest "
                f"request to {most} that the model has positions for; "
                f"{' and '.join(self.lengths)} make requests shorter"
            )
        return found


@dataclass(frozen=True)
class Prefixes(CachingScenario):
    """Many requests with few prefixes.

    Attributes:
        suffix_tokens: of a prompt, behind its prefix.
        at_once: most of them in flight.
    """

    columns: ClassVar = caching_columns(PREFIX_TTFT)
    ratio_columns: ClassVar = caching_ratios(PREFIX_TTFT)
    lengths: ClassVar = ("--prefix-tokens", "--output-tokens")

    prefixes: int = 3
    prefix_tokens: int = 1024
    suffix_tokens: int = 64
    requests: int = 24
    at_once: int = 8

    def workload(self, model: Path) -> SharedPrefixes:
        """Return the requests.

        Raises:
            ValueError: a prefix would be without a request.
        """
        if self.requests < self.prefixes:
            raise ValueError(
                f"requests: got {self.requests}, expected at least {self.prefixes}, "
                "one for each prefix"
            )
        return SharedPrefixes(
            token_ids=ordinary_token_ids(model),
            prefixes=self.prefixes,
            prefix_tokens=self.prefix_tokens,
            suffix_tokens=self.suffix_tokens,
            output_tokens=self.output_tokens,
            requests=self.requests,
            at_once=self.at_once,
            seed=self.seed,
        )


@dataclass(frozen=True)
class Turns(CachingScenario):
    """Conversations with a model that thinks before it answers.

    Attributes:
        thinking_tokens: first part of each output, which later prompts leave out.
    """

    columns: ClassVar = caching_columns(TURN_TTFT)
    ratio_columns: ClassVar = caching_ratios(TURN_TTFT)
    lengths: ClassVar = ("--turns", "--first-tokens", "--output-tokens")

    output_tokens: int = 192
    conversations: int = 6
    turns: int = 6
    first_tokens: int = 512
    message_tokens: int = 64
    thinking_tokens: int = 128

    def workload(self, model: Path) -> Conversations:
        """Return the requests.

        Raises:
            ValueError: there is no later turn, or no answer behind the thinking.
        """
        if self.turns < 2:
            raise ValueError(f"turns: got {self.turns}, expected at least 2")
        if not 0 <= self.thinking_tokens < self.output_tokens:
            raise ValueError(
                f"thinking_tokens: got {self.thinking_tokens}, expected 0 to "
                f"{self.output_tokens - 1}, less than the output"
            )
        return Conversations(
            token_ids=ordinary_token_ids(model),
            conversations=self.conversations,
            turns=self.turns,
            first_tokens=self.first_tokens,
            message_tokens=self.message_tokens,
            output_tokens=self.output_tokens,
            thinking_tokens=self.thinking_tokens,
            seed=self.seed,
        )


def named(kind: str, share: float) -> str:
    """Return the name of a server: `stock@0.4`."""
    return f"{kind}@{share:g}"


CACHING_SCENARIOS: dict[str, Prefixes | Turns] = {
    "prefixes": Prefixes(name="prefixes"),
    "turns": Turns(name="turns"),
}
