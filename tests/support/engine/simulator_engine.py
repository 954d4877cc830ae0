"""Random engines for the scheduler simulation: what they are and how they are built.

Owns scenarios and the real scheduler made from one, with its own VllmConfig and as
small a pool as the scenario asks for.
"""

import copy
import itertools
import os
import random
from dataclasses import dataclass
from math import lcm
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import (
    CacheConfig,
    ModelConfig,
    ObservabilityConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)

from vllm_kvpolicy.block_manager.manager import KVPolicySpec
from vllm_kvpolicy.block_manager.scheduler import (
    KVPolicyAsyncScheduler,
    KVPolicyScheduler,
)
from vllm_kvpolicy.config import KVPolicyConfig
from vllm_kvpolicy.config_keys import ALWAYS
from vllm_kvpolicy.sizes import max_blocks_per_request, other_groups

_instances = itertools.count()


@dataclass(frozen=True)
class Scenario:
    """One engine and its traffic.

    Args:
        depth: outputs in flight; 2 uses the asynchronous scheduler.
        block_size: N.
        spare: size of the pool beyond what one request needs, as a share of that.
        max_num_seqs, max_batched, long_prefill: vLLM's limits on a step.
        priorities: vLLM's priority scheduling in place of first come, first served.
        longest: max_model_len.
        arrivals: chance of a new request before a step.
        aborts: chance of an abort before a step and before an update.
        stops: chance that a sampled token ends its request.
        caching: vLLM's prefix cache is on, and prompts begin like earlier requests.
        foresees: requests enter by the forecast; else as vLLM lets them in.
        resets: chance before a step that all running requests lose what they hold.
        defers: chance that a step leaves prompts for a later one, as steps do with
            vLLM's `prefill_schedule_interval`.
        drafts: speculated tokens that a step computes at most for a request.
        windows: groups of layers with a sliding window, beside full attention.
        states: these groups are of layers with a state instead.
        window_tokens: that these attend to.
        retention: vLLM's `prefix_cache_retention_interval`.
        estimates: vLLM estimates the work of steps (`--enable-mfu-metrics`).
        pool: superblocks of the pool; None for what `spare` says.
        pins: chance that a request pins some of its prompt, or all.
        watermark: share of the pool that is to stay free behind one that enters.
    """

    policy: dict[str, Any]
    depth: int = 1
    block_size: int = 16
    spare: float = 0.0
    max_num_seqs: int = 8
    max_batched: int = 300
    long_prefill: int = 0
    priorities: bool = False
    longest: int = 400
    arrivals: float = 0.0
    aborts: float = 0.0
    stops: float = 0.0
    seed: int = 0
    caching: bool = False
    foresees: bool = True
    resets: float = 0.0
    defers: float = 0.0
    drafts: int = 0
    windows: int = 0
    states: bool = False
    window_tokens: int = 40
    retention: int | None = 0
    estimates: bool = False
    pool: int | None = None
    pins: float = 0.0
    watermark: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "policy", {"events": ALWAYS, **self.policy})


# Policies whose heads differ in length, by the names that the tests use: shorter
# windows than the default, so that intervals may be shorter than a superblock.
RAGGED: dict[str, dict[str, Any]] = {
    "adakv-snapkv": {"policy_config": {"window": 5}},
    "hard-tova": {
        "policy_config": {
            "window": 3,
            "hard_mode": "dynamic",
            "allow": ["adakv-knorm", "tova"],
        }
    },
    # What is admitted follows from the text; here it is drawn.
    "local": {"policy_config": {"allow": ["tova"]}},
}


def random_scenario(
    policy: str, depth: int, seed: int, caching: bool = False
) -> Scenario:
    """Draw an engine that the configuration accepts, tight more often than not."""
    rng = random.Random(f"{policy} {depth} {seed}")
    block_size = rng.choice((16, 32))
    recent, sinks = rng.randrange(0, 48), rng.randrange(0, 9)
    least = sinks + recent + block_size
    long_window = policy.startswith("ams")
    values = {
        "policy": policy,
        "budget": least + rng.choice((0, 1, rng.randrange(300), 7 * block_size)),
        "interval": rng.choice((32, 33, 64, 100, 200)[:: 1 if long_window else -1]),
        "recent": recent,
        "sinks": sinks,
        "prefill_interval": _prefill_interval(rng, block_size, caching),
        "events_per_step": (8, 1, 3)[seed % 3],
        "spread_events": seed % 5 != 4,
        **RAGGED.get(policy, {}),
    }
    if policy in RAGGED and rng.random() < 0.4:
        values["interval"] = rng.randint(5, block_size)
        values["budget"] += 3 * block_size
    elif not long_window and rng.random() < 0.3:
        values["interval"] = rng.randint(5 if policy in RAGGED else 1, 31)
    if policy == "streaming" and rng.random() < 0.25:
        values["pin"] = "prompt"
    pins = (0.0, 0.5)[seed // 2 % 2]
    return Scenario(
        policy=values,
        depth=depth,
        block_size=block_size,
        # With room for what several pin and share.
        spare=(1.5, 0.1, 0.5, 0.0)[seed % 4] + 1.5 * caching * bool(pins),
        max_num_seqs=rng.choice((2, 4, 8, 8)),
        max_batched=rng.choice((16, 64, 300, 1024)),
        long_prefill=rng.choice((0, 0, 48)),
        priorities=rng.random() < 0.25,
        longest=rng.choice((400, 900, 3600)),
        arrivals=rng.choice((0.05, 0.2, 0.5)),
        aborts=rng.choice((0.0, 0.01, 0.05)),
        stops=rng.choice((0.0, 0.0, 0.001, 0.01)),
        seed=rng.randrange(2**32),
        caching=caching,
        # Bounded requests are hardly ever preempted otherwise.
        foresees=seed % 3 != 1,
        pins=pins,
    )


def _prefill_interval(rng: random.Random, block_size: int, caching: bool) -> int | str:
    if caching and rng.random() < 0.3:
        return "prompt"
    return block_size * rng.choice((2, 3, 8, 20))


# Stands in for the StructuredOutputManager: no request has a grammar.
ACCEPTS_EVERYTHING = SimpleNamespace(
    accept_tokens=lambda request, token_ids: True,
    validate_tokens=lambda request, token_ids: token_ids,
)


def _speculation(scenario: Scenario, model: ModelConfig) -> SpeculativeConfig | None:
    """Return vLLM's configuration of n-gram drafts; the simulation draws them."""
    if not scenario.drafts:
        return None
    return SpeculativeConfig(
        method="ngram",
        num_speculative_tokens=scenario.drafts,
        prompt_lookup_max=2,
        target_model_config=model,
        target_parallel_config=ParallelConfig(),
    )


def make_scheduler(scenario: Scenario, model: ModelConfig) -> Scheduler:
    """Build the real scheduler with as small a pool as the scenario asks for."""
    model = copy.copy(model)
    model.max_model_len = scenario.longest
    scheduler_config = SchedulerConfig(
        max_num_seqs=scenario.max_num_seqs,
        max_num_batched_tokens=scenario.max_batched,
        max_model_len=model.max_model_len,
        long_prefill_token_threshold=scenario.long_prefill,
        policy="priority" if scenario.priorities else "fcfs",
        enable_chunked_prefill=True,
        is_encoder_decoder=False,
        watermark=scenario.watermark,
    )
    config = VllmConfig(
        model_config=model,
        scheduler_config=scheduler_config,
        cache_config=CacheConfig(
            block_size=scenario.block_size, enable_prefix_caching=scenario.caching
        ),
        additional_config={"kv_policy": scenario.policy},
        speculative_config=_speculation(scenario, model),
        observability_config=ObservabilityConfig(enable_mfu_metrics=scenario.estimates),
    )
    config.instance_id = f"simulation-{os.getpid()}-{next(_instances)}"
    policy = KVPolicyConfig.from_dict(scenario.policy)
    policy.validate_block_size(scenario.block_size)
    kind = "linear_attention" if scenario.states else "sliding_attention"
    kinds = ["full_attention", *[kind] * scenario.windows]
    if scenario.states and scenario.caching:
        config.cache_config.mamba_cache_mode = "align"
    text = copy.copy(model.hf_text_config)
    text.layer_types, text.sliding_window = kinds, scenario.window_tokens
    config.model_config.hf_text_config = text
    config.scheduler_config.async_scheduling = scenario.depth > 1
    limit = max_blocks_per_request(config, policy)
    sizes = {"num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
    sizes |= {"block_size": scenario.block_size}
    spec = KVPolicySpec(**sizes)
    window: Any = SlidingWindowSpec(**sizes, sliding_window=scenario.window_tokens)
    if scenario.states:
        window = MambaSpec(
            block_size=scenario.block_size if scenario.caching else scenario.longest,
            shapes=((spec.page_size_bytes,),),
            dtypes=(torch.uint8,),
            mamba_cache_mode=config.cache_config.mamba_cache_mode,
        )
    limit += other_groups(config).most_blocks(scenario.longest)
    usable = scenario.pool or int(limit * (1 + scenario.spare))
    config.cache_config.num_gpu_blocks = usable + 1
    cls = KVPolicyAsyncScheduler if scenario.depth > 1 else KVPolicyScheduler
    scheduler = cls(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=usable + 1,
            kv_cache_tensors=[],
            kv_cache_groups=[
                KVCacheGroupSpec(["full"], spec),
                *(
                    KVCacheGroupSpec([f"window {index}"], window)
                    for index in range(scenario.windows)
                ),
            ],
            prefix_cache_retention_interval=scenario.retention,
        ),
        structured_output_manager=ACCEPTS_EVERYTHING,
        block_size=lcm(scenario.block_size, window.block_size),
        hash_block_size=scenario.block_size,
        log_stats=scenario.estimates,
    )
    return scheduler
