"""Drives the real schedulers with random traffic and a worker made of integers.

Owns scenarios, traffic, the queue between scheduler and worker (one deep, or two deep
as with asynchronous scheduling) and the block accounting after every `schedule()`.
"""

import copy
import itertools
import pickle
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from simulator_tables import TableCheck
from simulator_worker import Asked, StorageWorker, check
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_kvpolicy.block_manager.events import EventPlan, Footprint
from vllm_kvpolicy.block_manager.limits import (
    max_blocks_per_request,
    max_global_blocks,
)
from vllm_kvpolicy.block_manager.manager import KVPolicySpec
from vllm_kvpolicy.block_manager.planner import Planner
from vllm_kvpolicy.config import KVPolicyConfig
from vllm_kvpolicy.scheduler import KVPolicyAsyncScheduler, KVPolicyScheduler

TOKEN, STOP_TOKEN = 5, 7
MAX_IDLE_STEPS = 6
_instances = itertools.count()


@dataclass(frozen=True)
class Scenario:
    """One engine and its traffic.

    Args:
        policy: plain form of the policy's configuration.
        depth: outputs in flight; 2 uses the asynchronous scheduler.
        block_size: N.
        spare: size of the pool beyond what one request needs, as a share of that.
        max_num_seqs, max_batched, long_prefill: vLLM's limits on a step.
        priorities: vLLM's priority scheduling in place of first come, first served.
        window_slots: query windows, None for what the engine would take.
        longest: max_model_len.
        arrivals: chance of a new request before a step.
        aborts: chance of an abort before a step and before an update.
        stops: chance that a sampled token ends its request.
        seed: of everything random.
    """

    policy: dict[str, Any]
    depth: int
    block_size: int
    spare: float
    max_num_seqs: int
    max_batched: int
    long_prefill: int
    priorities: bool
    window_slots: int | None
    longest: int
    arrivals: float
    aborts: float
    stops: float
    seed: int


def random_scenario(policy: str, depth: int, seed: int) -> Scenario:
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
        "prefill_interval": block_size * rng.choice((2, 3, 8, 20)),
        "events_per_step": rng.choice((1, 1, 2, 8)),
    }
    if not long_window and rng.random() < 0.3:
        values["interval"] = rng.randint(1, 31)
    if policy == "streaming" and rng.random() < 0.25:
        values["protect_prompt"] = True
    return Scenario(
        policy=values,
        depth=depth,
        block_size=block_size,
        spare=rng.choice((0.0, 0.1, 0.5, 1.5)),
        max_num_seqs=rng.choice((2, 4, 8, 8)),
        max_batched=rng.choice((16, 64, 300, 1024)),
        long_prefill=rng.choice((0, 0, 48)),
        priorities=rng.random() < 0.25,
        window_slots=rng.choice((None, 1, 2)),
        longest=rng.choice((400, 1200, 3600)),
        arrivals=rng.choice((0.05, 0.2, 0.5)),
        aborts=rng.choice((0.0, 0.01, 0.05)),
        stops=rng.choice((0.001, 0.01)),
        seed=rng.randrange(2**32),
    )


class AcceptEverything:
    """Stands in for the StructuredOutputManager; no request has a grammar."""

    def accept_tokens(self, request: Request, token_ids: list[int]) -> bool:
        """Accept."""
        return True


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
    )
    config = VllmConfig(
        model_config=model,
        scheduler_config=scheduler_config,
        cache_config=CacheConfig(
            block_size=scenario.block_size, enable_prefix_caching=False
        ),
        additional_config={"kv_policy": scenario.policy},
    )
    config.instance_id = f"simulation-{id(config)}-{next(_instances)}"
    policy = KVPolicyConfig.from_dict(scenario.policy)
    policy.validate_block_size(scenario.block_size)
    limit = max_blocks_per_request(config, policy)
    spec = KVPolicySpec(
        block_size=scenario.block_size,
        num_kv_heads=2,
        head_size=32,
        dtype=torch.float32,
        max_blocks_per_request=limit,
    )
    usable = int(limit * (1 + scenario.spare))
    config.cache_config.num_gpu_blocks = usable + 1
    cls = KVPolicyAsyncScheduler if scenario.depth > 1 else KVPolicyScheduler
    scheduler = cls(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=usable + 1,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        ),
        structured_output_manager=AcceptEverything(),
        block_size=scenario.block_size,
    )
    if scenario.window_slots is not None:
        limits = scheduler.kv_policy_limits
        slots = min(limits.window_slots, scenario.window_slots)
        scheduler.kv_policy_limits = replace(limits, window_slots=slots)
        scheduler.kv_policy_planner = Planner(scheduler.kv_policy_limits)
        manager = scheduler.kv_policy_manager
        manager.attach(scheduler.kv_policy_planner, manager.placement_name)
    return scheduler


class Simulation:
    """One engine under random traffic, checked at every step.

    Attributes:
        totals: steps, events, preemptions, aborts... so far.
    """

    def __init__(
        self,
        scenario: Scenario,
        model: ModelConfig,
        tamper: Callable[[Any], Any] | None = None,
    ) -> None:
        self.scenario = scenario
        self.rng = random.Random(scenario.seed)
        self.scheduler = make_scheduler(scenario, model)
        self.policy = KVPolicyConfig.from_dict(scenario.policy)
        self.tamper = tamper
        self.totals: Counter[str] = Counter()
        self.asked: dict[str, Asked] = {}
        self.peaks: dict[str, tuple[int, int]] = {}
        self.queue: deque[tuple[Any, Any]] = deque()
        self.idle = 0
        limits = self.scheduler.kv_policy_limits
        self.worker = StorageWorker(
            num_blocks=self.pool.num_gpu_blocks,
            block_size=scenario.block_size,
            max_row=-(-scenario.longest // scenario.block_size),
            window_slots=limits.window_slots,
            window_tokens=limits.window_tokens,
            keeps_all=limits.keeps_all,
            rng=np.random.default_rng(scenario.seed),
        )
        self.tables = TableCheck(
            scenario.max_num_seqs,
            max_global_blocks(self.scheduler.vllm_config, self.policy),
            scenario.block_size,
        )
        self._count_clips()

    def _count_clips(self) -> None:
        """Count how often a request was held back and how often it sat a step out."""
        planner = self.scheduler.kv_policy_planner
        clip = planner.clip

        def counting(request_id: str, computed: int, num_new: int) -> int:
            allowed = clip(request_id, computed, num_new)
            self.totals["clips"] += 0 < allowed < num_new
            self.totals["sit-outs"] += allowed == 0 < num_new
            return allowed

        planner.clip = counting

    @property
    def pool(self) -> Any:
        """Return vLLM's block pool."""
        return self.scheduler.kv_cache_manager.block_pool

    def run(self, num_steps: int) -> Counter[str]:
        """Take at least this many steps of traffic, then let the engine drain."""
        try:
            while self.totals["steps"] < num_steps:
                self._arrive()
                self._abort()
                self._turn()
            while self.scheduler.has_requests() or self.queue:
                self._turn()
                check(self.totals["steps"] < 20 * num_steps + 20_000, "does not drain")
            self._check_empty()
        except Exception as error:
            error.add_note(f"{self.scenario}\n{dict(self.totals)}")
            raise
        finally:
            self.totals += self.worker.totals
            self.scheduler.shutdown()
        return self.totals

    # -- traffic ----------------------------------------------------------------

    def _arrive(self) -> None:
        """Sometimes add a request, and sometimes a burst of equal ones."""
        rng, longest = self.rng, self.scenario.longest
        if len(self.scheduler.waiting) > 12 or rng.random() > self.scenario.arrivals:
            return
        prompt_len = rng.randint(1, 100 if rng.random() < 0.7 else longest - 1)
        max_tokens = rng.choice((rng.randint(1, 60), rng.randint(300, 700)))
        extra_args = self._wishes(min(prompt_len + max_tokens, longest))
        for _ in range(rng.choice((1, 1, 1, 1, 6))):
            self._add(prompt_len, max_tokens, extra_args)

    def _add(self, prompt_len: int, max_tokens: int, extra_args: Any) -> None:
        rng = self.rng
        self.totals["arrivals"] += 1
        self.totals["without policy"] += (extra_args or {}).get("kv_policy") == "none"
        request_id = f"r{self.totals['arrivals']}"
        request = Request(
            request_id=request_id,
            prompt_token_ids=[TOKEN] * prompt_len,
            sampling_params=SamplingParams(
                max_tokens=max_tokens,
                ignore_eos=True,
                stop_token_ids=[STOP_TOKEN],
                extra_args=extra_args,
            ),
            pooling_params=None,
            priority=rng.randrange(3),
        )
        self.asked[request_id] = self._asked(prompt_len, extra_args)
        self.scheduler.add_request(request)

    def _wishes(self, num_tokens: int) -> dict[str, Any] | None:
        """Return `extra_args`: mostly none, else smaller numbers or no policy."""
        rng, policy = self.rng, self.policy
        draw = rng.random()
        fits = num_tokens <= (self.pool.num_gpu_blocks - 1) * self.scenario.block_size
        if draw < 0.1 and fits:
            return {"kv_policy": "none"}
        if draw < 0.3:
            recent = rng.randint(0, policy.recent_tokens)
            sinks = rng.randint(0, policy.sink_tokens)
            least = recent + sinks + self.scenario.block_size
            window = self.scheduler.kv_policy_limits.window_tokens
            return {
                "kv_budget": rng.randint(least, policy.budget_tokens),
                "kv_interval": rng.randint(max(window, 1), policy.interval_tokens),
                "kv_recent": recent,
                "kv_sinks": sinks,
            }
        return None

    def _asked(self, prompt_len: int, extra_args: dict[str, Any] | None) -> Asked:
        wishes, policy = extra_args or {}, self.policy
        if wishes.get("kv_policy") == "none":
            return Asked(prompt_len, None, 0, 0)
        protected = prompt_len if policy.protects_prompt else 0
        plan = EventPlan(
            prompt_len,
            wishes.get("kv_budget", policy.budget_tokens) + protected,
            wishes.get("kv_interval", policy.interval_tokens),
            policy.prefill_interval_tokens,
        )
        sinks = max(wishes.get("kv_sinks", policy.sink_tokens), protected)
        recent = wishes.get("kv_recent", policy.recent_tokens)
        return Asked(prompt_len, plan, recent, sinks)

    def _abort(self) -> None:
        if self.scheduler.requests and self.rng.random() < self.scenario.aborts:
            victim = self.rng.choice(list(self.scheduler.requests))
            self.totals["aborts"] += 1
            self.scheduler.finish_requests(victim, RequestStatus.FINISHED_ABORTED)

    # -- the engine's loop --------------------------------------------------------

    def _turn(self) -> None:
        """Schedule if the queue has room, else execute and process the oldest."""
        if len(self.queue) < self.scenario.depth and self.scheduler.has_requests():
            self._schedule()
            # As EngineCore: keep the queue full before waiting for a result.
            full = len(self.queue) == self.scenario.depth
            if not full and self.rng.random() < 0.95:
                return
        if self.queue:
            self._process()

    def _schedule(self) -> None:
        output = self.scheduler.schedule()
        commands = pickle.loads(pickle.dumps(output.kv_policy))
        if self.tamper is not None:
            commands = self.tamper(commands)
        self.queue.append((output, commands))
        self.totals["steps"] += 1
        self.totals["tokens"] += output.total_num_scheduled_tokens
        self.totals["crowded steps"] += len(commands.events) > 1
        self.totals["captures"] += len(commands.captures)
        self.totals["preemptions"] += len(output.preempted_req_ids or ())
        self.idle = 0 if output.num_scheduled_tokens else self.idle + 1
        check(self.idle < MAX_IDLE_STEPS, "stalled with", list(self.scheduler.requests))
        self._check_blocks(output)

    def _process(self) -> None:
        output, commands = self.queue.popleft()
        sampling = set(self.worker.execute(output, commands, self.asked))
        self.tables.drop(output.finished_req_ids | (output.preempted_req_ids or set()))
        self.tables.update(commands.events)
        if commands.events or self.rng.random() < 0.1:
            self.tables.compare(output.num_scheduled_tokens, self.worker.live)
        names = list(output.num_scheduled_tokens)
        stop, draw = self.scenario.stops, self.rng.random
        result = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[
                [STOP_TOKEN if draw() < stop else TOKEN] if name in sampling else []
                for name in names
            ],
        )
        if self.scenario.depth > 1:
            self._abort()
        before = len(self.scheduler.requests)
        self.scheduler.update_from_output(output, result)
        self.totals["finished"] += before - len(self.scheduler.requests)

    # -- accounting -----------------------------------------------------------------

    def _check_blocks(self, output: Any) -> None:
        """Count every request's superblocks against the pool and its bound."""
        manager, scheduler = self.scheduler.kv_policy_manager, self.scheduler
        planner = scheduler.kv_policy_planner
        for request_id in (output.preempted_req_ids or set()) | output.finished_req_ids:
            self._check_peak(request_id)
        total = num_global = 0
        for request_id, blocks in manager.req_to_blocks.items():
            held = sum(not block.is_null for block in blocks)
            total += held
            end = scheduler.requests[request_id].num_computed_tokens
            state = planner.states.get(request_id)
            expected = len(blocks)
            if state is not None:
                expected += state.global_blocks - state.frontier_blocks
                num_global += state.global_blocks
            check(held == expected, request_id, "holds", held, "not", expected)
            if request_id in output.num_scheduled_tokens:
                most = max(held, self.peaks.get(request_id, (0, 0))[0])
                self.peaks[request_id] = most, end
                if state is not None and self.rng.random() < 0.05:
                    bound = planner.peak_blocks(request_id, end)
                    check(most <= bound, request_id, "held", most, "bound", bound)
        used = self.pool.num_gpu_blocks - 1 - self.pool.get_num_free_blocks()
        check(total == used, "requests hold", total, "of", used, "superblocks taken")
        check(num_global == planner.num_global_blocks, "global", num_global)
        check(manager.pool_counts() == (used - num_global, num_global), "pool counts")

    def _check_peak(self, request_id: str) -> None:
        """Compare the most that an incarnation held with the closed form."""
        held, end = self.peaks.pop(request_id, (0, 0))
        asked = self.asked[request_id]
        if not end:
            return
        expected = -(-end // self.scenario.block_size)
        if asked.plan is not None:
            keeps_all = self.scheduler.kv_policy_limits.keeps_all
            footprint = Footprint(
                asked.plan, asked.recent, self.scenario.block_size, keeps_all
            )
            expected = footprint.peak_blocks(end)
            self.totals["incarnations"] += 1
        check(held == expected, request_id, "held", held, "of", expected, "at", end)

    def _check_empty(self) -> None:
        """Check that nothing is left of any request."""
        planner = self.scheduler.kv_policy_planner
        free = self.pool.get_num_free_blocks()
        check(free == self.pool.num_gpu_blocks - 1, "pool not full:", free)
        check(not planner.states, "states left", planner.states)
        check(not planner._windows, "windows left", planner._windows)
        slots = sorted(planner._free_slots)
        check(slots == list(range(planner.limits.window_slots)), "slots", slots)
        check(planner.num_global_blocks == 0, "global", planner.num_global_blocks)
        check(not self.scheduler.kv_policy_manager.req_to_blocks, "rows left")
