"""Checks engines of this process: stock vLLM, `identity`, and a policy."""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from vllm import EngineArgs, SamplingParams, TokensPrompt
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from vllm_kvpolicy.commands import judge
from vllm_kvpolicy.commands.judge import Answer, Check, text
from vllm_kvpolicy.config import CONFIG_KEY, KVPolicyConfig

MOVER = "identity"
OUTPUT_TOKENS = 160
LEAST_HELD = 192  # tokens before an event; lengths grow by what is held beyond
Say = Callable[[str], None]


@dataclass(frozen=True)
class Sizes:
    """How long the requests are: all grow with the tokens held before an event.

    Each has an event: the first within its answer, the others at their prompts' ends.

    Args:
        held: budget + interval, in tokens.
    """

    held: int

    @property
    def _more(self) -> int:
        return max(self.held - LEAST_HELD, 0)

    @property
    def prompts(self) -> tuple[int, ...]:
        return tuple(tokens + self._more for tokens in (40, 200, 330))

    @property
    def longest(self) -> int:
        """Tokens of any request; a budget of as many never drops one."""
        return 512 + self._more

    @property
    def num_blocks(self) -> int:
        """Superblocks of 16 or more tokens, enough for all requests at once."""
        return 64 + len(self.prompts) * self.longest // 16

    @property
    def cache_bytes(self) -> int:
        """Memory that vLLM looks for; then it takes `num_blocks`."""
        return max(2**30, 2**19 * self.longest)

    def check(self, config: KVPolicyConfig, most: int) -> None:
        """Raise ValueError where requests of `most` tokens are not long enough."""
        if self.longest <= most:
            return
        room = most - self.longest + self.held
        raise ValueError(
            f"--kv-budget and --kv-interval: got {config.budget_tokens} and "
            f"{config.interval_tokens}, expected at most {room} tokens together, so "
            f"that requests of this model, of at most {most} tokens, have events"
        )


class Engine:
    """A vLLM engine in this process; without a policy's plain form it is stock."""

    def __init__(
        self,
        model: str,
        dtype: str,
        sizes: Sizes,
        policy: Mapping[str, Any] | None = None,
    ) -> None:
        additional = {} if policy is None else {CONFIG_KEY: dict(policy)}
        config = EngineArgs(
            model=model,
            dtype=dtype,
            max_model_len=sizes.longest,
            num_gpu_blocks_override=sizes.num_blocks,
            kv_cache_memory_bytes=sizes.cache_bytes,
            enforce_eager=True,
            additional_config=additional,
        ).create_engine_config()
        # The engine's class methods may start the model in another process.
        self._engine = LLMEngine(config, UniProcExecutor, log_stats=False)
        self._scheduler = self._engine.engine_core.engine_core.scheduler
        self.sizes = sizes
        self._asked = 0

    def prompts(self) -> list[list[int]]:
        encode = self._engine.get_tokenizer().encode
        return [
            list(encode(text(seed, length)))[:length]
            for seed, length in enumerate(self.sizes.prompts)
        ]

    def ask(
        self, prompts: Sequence[Sequence[int]], keys: Mapping[str, Any] | None = None
    ) -> list[Answer]:
        """Answer prompts greedily, all at once, with these keys of `vllm_xargs`."""
        params = SamplingParams(
            temperature=0,
            max_tokens=OUTPUT_TOKENS,
            ignore_eos=True,
            extra_args=dict(keys or {}),
        )
        order = []
        for prompt in prompts:
            order.append(str(self._asked))
            self._asked += 1
            tokens = TokensPrompt(prompt_token_ids=list(prompt))
            self._engine.add_request(order[-1], tokens, params)
        found = {}
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                said = (output.kv_transfer_params or {}).get(CONFIG_KEY)
                found[output.request_id] = Answer(
                    tuple(output.outputs[0].token_ids),
                    None if said is None else len(said["dropped"]),
                )
        return [found[name] for name in order]

    def counters(self) -> dict[str, float]:
        """Return the engine's counters; it has a policy."""
        return self._scheduler.kv_policy_counters.read()

    def num_held(self) -> int:
        """Return the superblocks that are not free, without vLLM's null block."""
        pool = self._scheduler.kv_cache_manager.block_pool
        return pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()

    def close(self) -> None:
        self._engine.engine_core.shutdown()


Values = Mapping[str, Any]
Judge = Callable[[Engine], Iterator[Check]]


def checks(model: str, dtype: str, config: KVPolicyConfig, say: Say) -> Iterator[Check]:
    """Start engines one after the other and yield what was found.

    Args:
        dtype: as for vLLM; float32 leaves no rounding by which moved tokens differ.
        say: is told what takes long before it begins.

    Raises:
        ValueError: there is no such model, or its requests are too short for an event.
    """
    sizes = Sizes(config.budget_tokens + config.interval_tokens)
    sizes.check(config, EngineArgs(model=model).create_model_config().max_model_len)
    prompts: list[list[int]] = []
    stock: list[Answer] = []

    def judged(where: str, policy: Values | None, judge_it: Judge) -> Iterator[Check]:
        say(f"starting {where}")

        def begun() -> Iterator[Check]:
            with _started(model, dtype, sizes, policy) as engine:
                name = f"{where}: the engine answers"
                yield from judge.until_stopped(name, judge_it(engine))

        yield from judge.until_stopped(f"{where}: the engine starts", begun())

    def asked(engine: Engine) -> Iterator[Check]:
        prompts.extend(engine.prompts())
        stock.extend(engine.ask(prompts))
        yield from ()

    yield from judged("stock vLLM", None, asked)
    if not stock:
        return
    # Requests have their events where a kept prompt would not count.
    values = {**config.to_dict(), "report_events": True, "pin": "none"}
    mover = {**values, "policy": MOVER, "policy_config": {}, "allow": []}
    yield from judged(MOVER, mover, lambda engine: _mover(engine, prompts, stock))
    policy = {**values, "budget": sizes.longest}
    yield from judged(
        config.policy, policy, lambda engine: _policy(engine, prompts, stock, config)
    )


@contextmanager
def _started(*arguments: Any) -> Iterator[Engine]:
    """Start an engine with these arguments, and shut it down at the end."""
    engine = Engine(*arguments)
    try:
        yield engine
    finally:
        engine.close()
        del engine
        gc.collect()


def _mover(
    engine: Engine, prompts: Sequence[Sequence[int]], stock: Sequence[Answer]
) -> Iterator[Check]:
    """Judge the policy that keeps every token and moves most of them."""
    before = engine.counters()
    found = engine.ask(prompts)
    grown = judge.growth(before, engine.counters())
    name = f"{MOVER}: tokens that were moved give stock's answers"
    yield judge.same_tokens(name, stock, found, grown, has_events=True)
    yield judge.counters_agree(MOVER, found, grown)
    yield judge.pool_is_free(MOVER, engine.num_held())


def _policy(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    stock: Sequence[Answer],
    config: KVPolicyConfig,
) -> Iterator[Check]:
    """Judge a policy: with a budget that never binds, and with its own."""
    info = config.resolved().info
    start = engine.counters()
    ample = engine.ask(prompts)
    between = engine.counters()
    most = engine.sizes.longest
    name = f"{config.policy}: a budget of {most} tokens gives stock's answers"
    grown = judge.growth(start, between)
    check = judge.same_tokens(name, stock, ample, grown, has_events=False)
    yield judge.left_open(check, _differs_from_stock(config))
    small = {} if info.is_unbounded else {"kv_budget": config.budget_tokens}
    found = engine.ask(prompts, small)
    end = engine.counters()
    check = judge.memory_returns(judge.growth(between, end))
    why = "without a scorer it may keep every token" if info.keeps_all else None
    yield judge.left_open(check, why)
    grown = judge.growth(start, end)
    yield judge.counters_agree(config.policy, [*ample, *found], grown)
    yield judge.pool_is_free(config.policy, engine.num_held())


def _differs_from_stock(config: KVPolicyConfig) -> str | None:
    """Return why a policy need not give stock's answers under an ample budget."""
    if config.resolved().info.is_unbounded:
        return "it has no budget"
    return "`exact` masks tokens before any event" if config.is_exact else None
