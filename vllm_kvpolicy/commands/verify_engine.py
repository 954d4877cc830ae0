"""Checks engines of this process: stock vLLM, `identity`, and a policy."""

import gc
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

from vllm import EngineArgs, SamplingParams, TokensPrompt
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from vllm_kvpolicy import compat
from vllm_kvpolicy.commands import judge
from vllm_kvpolicy.commands.judge import Answer, Check, text
from vllm_kvpolicy.commands.trials import Trial, numbers
from vllm_kvpolicy.config import CONFIG_KEY, KVPolicyConfig

MOVER = "identity"
OUTPUT_TOKENS = 160
# As servers capture attention, without compiling the model.
GRAPHS = {
    "enforce_eager": False,
    "compilation_config": {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [1, 2, 4, 8, 16],
    },
}
LEAST_SHARE = 0.02  # of a GPU that has to be free
EXACT = "float32"  # the dtype in which nothing but equal tokens will do
# Nats: tokens of half precision that are closer are level, and stock beside itself must
# not differ where they are further apart than half of the other.
LEVEL, MOST_LEVEL = 0.13, 1.0
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
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        additional = {} if policy is None else {CONFIG_KEY: dict(policy)}
        config = EngineArgs(
            # vLLM writes into some of them.
            **deepcopy({"enforce_eager": True, **(settings or {})}),
            model=model,
            dtype=dtype,
            max_model_len=sizes.longest,
            num_gpu_blocks_override=sizes.num_blocks,
            kv_cache_memory_bytes=sizes.cache_bytes,
            gpu_memory_utilization=LEAST_SHARE,  # others may be on this GPU
            additional_config=additional,
        ).create_engine_config()
        # The engine's class methods may start the model in another process.
        self._engine = LLMEngine(config, UniProcExecutor, log_stats=False)
        self._scheduler = self._engine.engine_core.engine_core.scheduler
        self.sizes = sizes
        self._asked = 0

    def prompts(self) -> list[list[int]]:
        """Return prompts of text, or of numbers where there is no tokenizer."""
        lengths = self.sizes.prompts
        if self._engine.model_config.skip_tokenizer_init:
            return [numbers(seed, length) for seed, length in enumerate(lengths)]
        encode = self._engine.get_tokenizer().encode
        return [
            list(encode(text(seed, length)))[:length]
            for seed, length in enumerate(lengths)
        ]

    def ask(
        self, prompts: Sequence[Sequence[int]], keys: Mapping[str, Any] | None = None
    ) -> list[Answer]:
        """Answer prompts greedily, all at once, with these keys of `vllm_xargs`."""
        params = SamplingParams(
            temperature=0,
            max_tokens=OUTPUT_TOKENS,
            ignore_eos=True,
            logprobs=2,
            detokenize=False,
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
                completion = output.outputs[0]
                found[output.request_id] = Answer(
                    tuple(completion.token_ids),
                    None if said is None else len(said["dropped"]),
                    tuple(map(_close, completion.logprobs)),
                )
        return [found[name] for name in order]

    @property
    def can_sleep(self) -> bool:
        return bool(self._engine.model_config.enable_sleep_mode)

    def nap(self) -> None:
        """Give the memory of weights and pool back, and take it again."""
        self._engine.sleep(level=1)
        self._engine.wake_up()

    def counters(self) -> dict[str, float]:
        return self._scheduler.kv_policy_counters.read()

    def num_held(self) -> int:
        """Return the superblocks that are not free, without vLLM's null block."""
        pool = self._scheduler.kv_cache_manager.block_pool
        return pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()

    def close(self) -> None:
        self._engine.engine_core.shutdown()
        del self._engine, self._scheduler
        gc.collect()


def _close(logprobs: Mapping[int, Any]) -> tuple[float, int]:
    """Return by how much the best token is ahead of the next, in nats, and that one."""
    values = {token: each.logprob for token, each in logprobs.items()}
    best, second = sorted(values, key=values.__getitem__, reverse=True)[:2]
    return values[best] - values[second], second


OF_MODEL = Trial(is_ragged=False)
Values = Mapping[str, Any]
Judge = Callable[[Engine], Iterator[Check]]
Named = tuple[str, Values | None]


def checks(
    model: str,
    dtype: str,
    config: KVPolicyConfig,
    say: Say,
    settings: Values = MappingProxyType({}),
    trial: Trial = OF_MODEL,
) -> Iterator[Check]:
    """Start engines one after the other and yield what was found.

    Args:
        dtype: as for vLLM; float32 leaves no rounding by which moved tokens differ.
            Of others stock beside itself shows how much that is.
        settings: of vLLM's EngineArgs, for all engines.
        trial: which engines there are beside, and what those have that move tokens.

    Raises:
        ValueError: there is no such model, or its requests are too short for an event.
    """
    sizes = Sizes(config.budget_tokens + config.interval_tokens)
    about = EngineArgs(**settings, model=model).create_model_config()
    sizes.check(config, about.max_model_len)
    seen = Asked(dtype == EXACT, trial.has_stock)
    drafts = "speculative_config" in settings

    def judged(
        where: str, policy: Values | None, judge_it: Judge, own: Values = settings
    ) -> Iterator[Check]:
        say(f"starting {where}")

        def begun() -> Iterator[Check]:
            with closing(Engine(model, dtype, sizes, policy, own)) as engine:
                name = f"{where}: the engine answers"
                yield from judge.until_stopped(name, judge_it(engine))

        yield from judge.until_stopped(f"{where}: the engine starts", begun())

    reference, movers, policy = _engines(config, sizes, trial)
    yield from judged(*reference, seen.ask)
    if not seen.answers:
        return
    if not trial.has_stock:
        others = {k: v for k, v in settings.items() if k != "kv_cache_dtype"}
        yield from judged("stock vLLM without it", None, seen.begin_alike, others)
    for where, values in movers:
        judge_it = partial(_mover, where=where, seen=seen, drafts=drafts)
        yield from judged(where, values, judge_it, {**settings, **trial.of_mover})
    yield from judged(*policy, partial(_policy, seen=seen, config=config))


def _engines(
    config: KVPolicyConfig, sizes: Sizes, trial: Trial
) -> tuple[Named, list[Named], Named]:
    """Return what is right, what moves tokens, and the policy, with their names.

    Requests have their events where a kept prompt would not count.
    """
    values = {**config.to_dict(), "report_events": True, "pin": "none"}
    mover = {**values, "policy": MOVER, "policy_config": {}, "allow": []}
    never = {**mover, "policy": "streaming", "budget": sizes.longest}
    reference = ("stock vLLM", None) if trial.has_stock else ("no event", never)
    movers: list[Named] = [(MOVER, mover)]
    if trial.is_ragged:
        own_lengths = {**mover, "policy_config": {"ragged": True}}
        movers.append((f"{MOVER} of own lengths", own_lengths))
    return reference, movers, (config.policy, {**values, "budget": sizes.longest})


def trial_checks(
    trial: Trial, dtypes: Sequence[str], config: KVPolicyConfig, say: Say
) -> Iterator[Check]:
    """Yield the checks of a feature, on engines of its own model, for each dtype.

    In half precision attention is captured in graphs, as by servers, where it can be.
    """
    with TemporaryDirectory() as folder:
        model = str(trial.make(Path(folder)))
        for dtype in dtypes:
            settings = {"skip_tokenizer_init": True, **trial.settings}
            if dtype != EXACT:
                settings |= GRAPHS
            config_json = json.loads((Path(model) / "config.json").read_text())
            if compat.platform_name() == "cuda":  # for stock, too
                cache = str(settings.get("kv_cache_dtype", "auto"))
                backend = compat.cuda_attention_backend(config_json, dtype, cache)
                settings.setdefault("attention_backend", backend)
            elif compat.caches_latents(config_json):
                settings["attention_backend"] = "CPU_MLA"
                settings["block_size"] = compat.LATENT_TOKENS
            for check in checks(model, dtype, config, say, settings, trial):
                yield replace(check, name=f"{dtype}, {check.name}")


class Asked:
    """Prompts, and the answers that are right.

    Args:
        is_exact: other answers are wrong; else stock beside itself shows by how much
            they may differ.
        is_stock: the answers are stock's, else of a policy without events.

    Attributes:
        level: nats by which tokens may differ that change places.
    """

    def __init__(self, is_exact: bool, is_stock: bool) -> None:
        self.is_exact, self.level = is_exact, 0.0
        self.whose = "stock's answers" if is_stock else "the answers without events"
        self.prompts: list[list[int]] = []
        self.answers: list[Answer] = []

    def ask(self, engine: "Engine") -> Iterator[Check]:
        """Take the answers of an engine as the right ones."""
        self.prompts = engine.prompts()
        self.answers = engine.ask(self.prompts)
        if not self.is_exact:
            alone = [engine.ask([prompt])[0] for prompt in self.prompts]
            self.level = max(LEVEL, 2 * judge.widest_lead(self.answers, alone))
            yield judge.is_steady(self.level, MOST_LEVEL)

    def begin_alike(self, engine: "Engine") -> Iterator[Check]:
        """Judge whether they begin as those of an engine without the feature."""
        yield judge.begin_alike(engine.ask(self.prompts), self.answers)

    def judged(
        self, name: str, found: Sequence[Answer], grown: Values, has_events: bool
    ) -> Check:
        told, right = f"{name} {self.whose}", self.answers
        return judge.same_tokens(
            told, right, found, grown, has_events=has_events, level=self.level
        )


def _mover(engine: Engine, where: str, seen: Asked, drafts: bool) -> Iterator[Check]:
    """Judge the policy that keeps every token and moves most of them."""
    for when in ("", "after sleep, ")[: 1 + engine.can_sleep]:
        if when:
            engine.nap()
        before = engine.counters()
        found = engine.ask(seen.prompts)
        grown = judge.growth(before, engine.counters())
        name = f"{where}: {when}tokens that were moved give"
        yield seen.judged(name, found, grown, has_events=True)
    if drafts:
        yield judge.drafts_are_taken(found, grown)
    yield judge.counters_agree(where, found, grown)
    yield judge.pool_is_free(where, engine.num_held())


def _policy(engine: Engine, seen: Asked, config: KVPolicyConfig) -> Iterator[Check]:
    """Judge a policy: with a budget that never binds, and with its own."""
    info = config.resolved().info
    start = engine.counters()
    ample = engine.ask(seen.prompts)
    between = engine.counters()
    most = engine.sizes.longest
    name = f"{config.policy}: a budget of {most} tokens gives"
    grown = judge.growth(start, between)
    check = seen.judged(name, ample, grown, has_events=False)
    yield judge.left_open(check, _differs_from_stock(config))
    small = {} if info.is_unbounded else {"kv_budget": config.budget_tokens}
    found = engine.ask(seen.prompts, small)
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
