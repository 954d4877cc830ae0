"""Drives the real schedulers with random traffic and a worker made of integers.

Owns the traffic, the queue between scheduler and worker (one deep, or two deep as with
asynchronous scheduling) and the block accounting after every `schedule()`.
"""

import gc
import pickle
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace
from types import (
    BuiltinFunctionType,
    FunctionType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any

import numpy as np
from vllm.config import ModelConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from support.engine.simulator_answers import LateAnswers
from support.engine.simulator_cache import CacheCheck
from support.engine.simulator_engine import Scenario, make_scheduler
from support.engine.simulator_forecast import ForecastCheck
from support.engine.simulator_pages import Asked, check
from support.engine.simulator_tables import RaggedCheck, TableCheck
from support.engine.simulator_windows import StateCheck, WindowCheck
from support.engine.simulator_worker import StorageWorker
from vllm_kvpolicy.api.request_guards import check_params
from vllm_kvpolicy.config import KVPolicyConfig
from vllm_kvpolicy.config_keys import PRESSURE
from vllm_kvpolicy.events import EventPlan, request_phase
from vllm_kvpolicy.policies.names import parse
from vllm_kvpolicy.sizes import max_global_blocks, query_rows

# What they lead to belongs to the process.
SHARED = type, ModuleType, FunctionType, BuiltinFunctionType, MethodType
GROWING = dict, list, set, frozenset


def num_entries(root: Any) -> int:
    """Return the entries of all dicts, lists and sets that an object leads to.

    Deques do not count: those of a scheduler have a length that they do not exceed.
    """
    seen, waiting, found = {id(root)}, [root], 0
    while waiting:
        holder = waiting.pop()
        if isinstance(holder, GROWING):
            found += len(holder)
        for each in gc.get_referents(holder):
            if id(each) not in seen and not isinstance(each, SHARED):
                seen.add(id(each))
                waiting.append(each)
    return found


TOKEN, STOP_TOKEN = 5, 7
MAX_IDLE_STEPS = 6


class Simulation:
    """One engine under random traffic, checked at every step.

    Attributes:
        totals: steps, events, preemptions, aborts... so far.
        left: entries that the scheduler held each time that it had drained.
    """

    def __init__(
        self,
        scenario: Scenario,
        model: ModelConfig,
        tamper: Callable[[Any], Any] | None = None,
    ) -> None:
        self.scenario = scenario
        self.rng = random.Random(scenario.seed)
        self.seeds = random.Random(scenario.seed + 1)
        self.pins = random.Random(scenario.seed + 2)
        self.scheduler = make_scheduler(scenario, model)
        self.policy = KVPolicyConfig.from_dict(scenario.policy)
        self.tamper = tamper
        self.totals: Counter[str] = Counter()
        self.asked: dict[str, Asked] = {}
        self.peaks: dict[str, tuple[int, int]] = {}
        self.queue: deque[tuple[Any, Any, np.ndarray]] = deque()
        self.idle = 0
        self.left: list[int] = []
        self.group_size = query_rows(self.scheduler.vllm_config)
        self.cache = CacheCheck(self.pool, scenario) if scenario.caching else None
        if self.cache is not None:
            self.cache.watch(self.scheduler, self.asked)
        self.worker = StorageWorker(
            num_blocks=self.pool.num_gpu_blocks,
            block_size=scenario.block_size,
            max_row=-(-scenario.longest // scenario.block_size),
            group_size=self.group_size,
            rng=np.random.default_rng(scenario.seed),
        )
        kind = StateCheck if scenario.states else WindowCheck
        self.windows = kind(self.scheduler, scenario, self.worker)
        sizes = (
            scenario.max_num_seqs,
            max_global_blocks(self.scheduler.vllm_config, self.policy),
            scenario.block_size,
        )
        is_ragged = self.policy.is_ragged
        blocks = self.pool.num_gpu_blocks
        self.tables = RaggedCheck(*sizes, blocks) if is_ragged else TableCheck(*sizes)
        self.answers = LateAnswers(self.scheduler, self.worker, self.totals, self.rng)
        self.forecast = ForecastCheck(self.scheduler, scenario, self.asked, self.totals)
        self._count_clips()

    def _count_clips(self) -> None:
        """Count how often a request was held back and how often it sat a step out."""
        planner = self.scheduler.kv_policy_planner
        clip = planner.clip

        def counting(request_id: str, computed: int, num_new: int, *sure: bool) -> int:
            allowed = clip(request_id, computed, num_new, *sure)
            self.totals["clips"] += 0 < allowed < num_new
            self.totals["sit-outs"] += allowed == 0 < num_new
            return allowed

        planner.clip = counting

    @property
    def pool(self) -> Any:
        return self.scheduler.kv_cache_manager.block_pool

    def run(self, num_steps: int, num_drains: int = 1) -> Counter[str]:
        """Take this many steps of traffic; let the engine drain at the end."""
        try:
            for drain in range(1, num_drains + 1):
                self._live_until(num_steps * drain // num_drains)
            self.forecast.finish()
        except Exception as error:
            error.add_note(f"{self.scenario}\n{dict(self.totals)}")
            raise
        finally:
            self.totals += self.worker.totals
            self.scheduler.shutdown()
        return self.totals

    def _live_until(self, num_steps: int) -> None:
        while self.totals["steps"] < num_steps:
            self._arrive()
            self._abort()
            self._reset()
            self._turn()
        self._abort_waiting()
        while self.scheduler.has_requests() or self.queue:
            self._turn()
            check(self.totals["steps"] < 20 * num_steps + 20_000, "does not drain")
        self._check_empty()
        if self.scenario.caching:
            self.scheduler.reset_prefix_cache()  # how much it has varies
        self.left.append(num_entries(self.scheduler))

    # -- traffic ----------------------------------------------------------------

    def _arrive(self) -> None:
        """Sometimes add a request, and sometimes a burst of equal ones.

        The sampling seed decides on the phase, where prompts are equal.
        """
        rng, longest = self.rng, self.scenario.longest
        if len(self.scheduler.waiting) > 12 or rng.random() > self.scenario.arrivals:
            return
        is_short = rng.random() < (0.4 if self.scenario.caching else 0.7)
        prompt_len = rng.randint(1, 100 if is_short else longest - 1)
        max_tokens = rng.choice((rng.randint(1, 60), rng.randint(200, 500)))
        extra_args = self._wishes(min(prompt_len + max_tokens, longest))
        if extra_args and self._is_refused(prompt_len, max_tokens, extra_args):
            extra_args = None
        if self._is_refused(prompt_len, max_tokens, extra_args):
            return
        seed = self.seeds.choice((None, self.seeds.randrange(2**40)))
        for _ in range(rng.choice((1, 1, 1, 5))):
            self._add(prompt_len, max_tokens, extra_args, seed)

    def _add(
        self, prompt_len: int, max_tokens: int, extra_args: Any, seed: int | None
    ) -> None:
        rng = self.rng
        self.totals["arrivals"] += 1
        self.totals["without policy"] += (extra_args or {}).get("kv_policy") == "none"
        request_id = f"r{self.totals['arrivals']}"
        prompt, salt = [TOKEN] * prompt_len, None
        if self.cache is not None:
            prompt, salt = self.cache.draw_prompt(prompt_len, rng)
        request = Request(
            request_id=request_id,
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(
                seed=seed,
                max_tokens=max_tokens,
                ignore_eos=True,
                stop_token_ids=[STOP_TOKEN] if self.scenario.stops else [],
                extra_args=extra_args,
            ),
            pooling_params=None,
            priority=rng.randrange(3),
            cache_salt=salt,
            block_hasher=self.cache and self.cache.hasher,
        )
        asked = self._asked(prompt_len, extra_args, request_phase(prompt, seed))
        if self.cache is not None:
            most = prompt_len + max_tokens + self.scenario.drafts
            most = min(most, self.scenario.longest)
            asked = replace(asked, codes=self.cache.codes(prompt, salt, most, TOKEN))
        self.asked[request_id] = asked
        self.scheduler.add_request(request)

    def _is_refused(self, prompt_len: int, max_tokens: int, wishes: Any) -> bool:
        """Return whether the API process refuses a request: the pool is too small."""
        params = SimpleNamespace(max_tokens=max_tokens, extra_args=wishes)
        try:
            check_params(params, prompt_len, self.scheduler.vllm_config, self.policy)
        except ValueError:
            return True
        return False

    def _wishes(self, num_tokens: int) -> dict[str, Any] | None:
        """Return `extra_args`: mostly none, else smaller numbers or no policy."""
        rng, policy = self.rng, self.policy
        draw = rng.random()
        beside = self.scheduler.kv_policy_manager.others.sizes.most_blocks(num_tokens)
        usable = self.pool.num_gpu_blocks - 1 - beside
        fits = num_tokens <= usable * self.scenario.block_size
        if draw < 0.1 and fits:
            return {"kv_policy": "none"}
        wishes: dict[str, Any] = {}
        if len(policy.policies) > 1 and rng.random() < 0.4:
            wishes["kv_policy"] = rng.choice(policy.policies)
        if draw < 0.3:
            recent = rng.randint(0, policy.recent_tokens)
            sinks = rng.randint(0, policy.sink_tokens)
            least = recent + sinks + self.scenario.block_size
            window = max(each.window_tokens for each in policy.all_resolved)
            least = max(least, self.scenario.drafts)
            budget = rng.randint(least, policy.budget_tokens)
            wishes["kv_interval"] = rng.randint(max(window, 1), policy.interval_tokens)
            if parse(wishes.get("kv_policy", policy.policy)).admission is None:
                wishes |= {"kv_budget": budget, "kv_recent": recent, "kv_sinks": sinks}
        if self.scenario.pins and self.pins.random() < self.scenario.pins:
            tokens = self.pins.randrange(300), self.pins.randrange(90)
            wishes["kv_pin"] = self.pins.choice(("prompt", *tokens))
        return wishes or None

    def _asked(
        self, prompt_len: int, extra_args: dict[str, Any] | None, phase: int
    ) -> Asked:
        wishes, policy = extra_args or {}, self.policy
        name = wishes.get("kv_policy", policy.policy)
        if name == "none":
            return Asked(prompt_len)
        found = policy.resolved(name)
        info, options = found.info, found.options
        pinned = wishes.get("kv_pin", policy.pins)
        pinned = {"none": 0, "prompt": prompt_len}.get(pinned, pinned)
        pinned = min(pinned, prompt_len)
        budget = wishes.get("kv_budget", policy.budget_tokens) + pinned
        if info.is_unbounded:
            # Events begin when the first page has left the window.
            least = max(policy.sink_tokens, pinned) + policy.recent_tokens
            budget = least + self.scenario.block_size
        plan = EventPlan(
            prompt_len,
            budget,
            wishes.get("kv_interval", policy.interval_tokens),
            policy.prefill_step(self.scenario.block_size),
            phase if policy.spread_events else 0,
            found.window_tokens,
        )
        window = found.window_tokens
        parts = window * self.group_size
        return Asked(
            prompt_len=prompt_len,
            plan=plan,
            recent=wishes.get("kv_recent", policy.recent_tokens),
            sinks=max(wishes.get("kv_sinks", policy.sink_tokens), pinned),
            pinned=pinned // self.scenario.block_size,
            policy=name,
            window=window,
            window_blocks=-(-parts // (2 * self.scenario.block_size)),
            keeps_all=info.keeps_all,
            is_ragged=info.is_ragged(options),
            is_dynamic=options.get("hard_mode") == "dynamic"
            or info.admission is not None,
            is_called=policy.events == PRESSURE and not info.is_unbounded,
        )

    def _abort(self) -> None:
        if self.scheduler.requests and self.rng.random() < self.scenario.aborts:
            victim = self.rng.choice(list(self.scheduler.requests))
            self.totals["aborts"] += 1
            self.scheduler.finish_requests(victim, RequestStatus.FINISHED_ABORTED)

    def _abort_waiting(self) -> None:
        """Abort what still waits, but sometimes for two, so that a drain is short."""
        waiting = [request.request_id for request in self.scheduler.waiting]
        waiting = waiting[self.rng.choice((0, 2)) :]
        self.totals["aborts"] += len(waiting)
        self.scheduler.finish_requests(waiting, RequestStatus.FINISHED_ABORTED)

    def _reset(self) -> None:
        """Sometimes reset the prefix cache; steps may be under way."""
        if not (self.scenario.resets and self.rng.random() < self.scenario.resets):
            return
        self.totals["resets"] += 1
        self.totals["resets with steps under way"] += bool(self.queue)
        self.totals["requests reset"] += len(self.scheduler.running)
        self.scheduler.reset_prefix_cache(reset_running_requests=True)
        self._check_nothing_held()

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
        before = self.cache and self.cache.snapshot(self.scheduler)
        defers = self._defers()
        self.totals["steps that defer prompts"] += defers
        requests = self.scheduler.running
        drafted = {each.request_id for each in requests if each.spec_token_ids}
        output = self.scheduler.schedule(throttle_prefills=defers)
        cached = np.empty(0, np.int64)
        if self.cache is not None:
            cached = self.cache.check(output, self.scheduler, before)
        commands = pickle.loads(pickle.dumps(output.kv_policy_commands))
        if self.tamper is not None:
            commands = self.tamper(commands)
        self.queue.append((output, commands, cached))
        self.totals["steps"] += 1
        self.totals["tokens"] += output.total_num_scheduled_tokens
        self.totals["crowded steps"] += len(commands.events) > 1
        self.totals["captures"] += len(commands.captures)
        preempted = output.preempted_req_ids or set()
        self.totals["preemptions"] += len(preempted)
        self.totals["preemptions with drafts"] += len(preempted & drafted)
        self.idle = 0 if output.num_scheduled_tokens else self.idle + 1
        check(self.idle < MAX_IDLE_STEPS, "stalled with", list(self.scheduler.requests))
        self._check_blocks(output)
        self.forecast.check(output)

    def _defers(self) -> bool:
        """Return whether prompts wait in this step, in which there are answers."""
        if not any(not each.is_prefill_chunk for each in self.scheduler.running):
            return False
        return bool(self.scenario.defers) and self.rng.random() < self.scenario.defers

    def _process(self) -> None:
        output, commands, cached = self.queue.popleft()
        sampled, answers = self.worker.execute(output, commands, self.asked, cached)
        self.windows.execute(output)
        if self.cache is not None and not self.queue and self.rng.random() < 0.2:
            self.totals["cached blocks"] += self.cache.compare(self.worker.tokens)
        self.tables.drop(output.finished_req_ids | (output.preempted_req_ids or set()))
        self.tables.update(commands.events, self.worker.live)
        if commands.events or self.rng.random() < 0.1:
            self.tables.compare(output.num_scheduled_tokens, self.worker.live)
        names = list(output.num_scheduled_tokens)
        stop, draw = self.scenario.stops, self.rng.random
        result = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[
                [STOP_TOKEN if draw() < stop else TOKEN for _ in range(sampled[name])]
                for name in names
            ],
        )
        result.kv_policy_answers = self.answers.due(answers)
        if self.scenario.depth > 1:
            self._abort()
        before = len(self.scheduler.requests)
        manager = self.scheduler.kv_policy_manager
        returned = manager.blocks_returned
        self.scheduler.update_from_output(output, result)
        self._draft(names)
        self.totals["superblocks trimmed"] += manager.blocks_returned - returned
        self.totals["finished"] += before - len(self.scheduler.requests)

    def _draft(self, names: list[str]) -> None:
        """Draw drafts for the next step, often fewer than there may be."""
        if not self.scenario.drafts:
            return
        counts = [self.rng.randint(0, self.scenario.drafts) for _ in names]
        drafts = [[TOKEN] * count for count in counts]
        self.scheduler.update_draft_token_ids(DraftTokenIds(names, drafts))

    # -- accounting -----------------------------------------------------------------

    def _check_blocks(self, output: Any) -> None:
        """Count every request's superblocks against the pool and its bound."""
        manager, scheduler = self.scheduler.kv_policy_manager, self.scheduler
        planner = scheduler.kv_policy_planner
        for request_id in (output.preempted_req_ids or set()) | output.finished_req_ids:
            self._check_peak(request_id)
        owned: list[int] = []
        num_global = 0
        for request_id, blocks in manager.req_to_blocks.items():
            mine = [block.block_id for block in blocks if not block.is_null]
            held = len(mine)
            owned += mine
            end = scheduler.requests[request_id].num_computed_tokens
            state = planner.states.get(request_id)
            expected = len(blocks)
            if state is not None:
                expected += state.global_blocks - state.frontier_blocks
                num_global += state.num_survivors
            check(held == expected, request_id, "holds", held, "not", expected)
            window = state.window if state is not None else ()
            owned += window
            held += len(window)
            if request_id in output.num_scheduled_tokens:
                earlier = self.peaks.get(request_id, (0, 0))
                # Drafts that are rejected have taken superblocks all the same.
                most, end = max(held, earlier[0]), max(end, earlier[1])
                self.peaks[request_id] = most, end
                is_fixed = not self.asked[request_id].is_called
                if state is not None and is_fixed and self.rng.random() < 0.05:
                    bound = planner.peak_blocks(request_id, end)
                    check(most <= bound, request_id, "held", most, "bound", bound)
        owned += self.windows.owned()
        total = len(set(owned))
        self.totals["shared superblocks"] += len(owned) - total
        is_shared = self.cache.may_share if self.cache else lambda block_id: False
        counts = Counter(owned) if len(owned) > total else {}
        twice = [each for each, count in counts.items() if count > 1]
        wrong = [each for each in twice if not is_shared(each)]
        check(not wrong, "a superblock is owned twice", wrong)
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
        if asked.is_called:
            expected += asked.window_blocks
        elif asked.plan is not None:
            expected = asked.footprint(self.scenario.block_size).peak_blocks(end)
        self.totals["incarnations"] += asked.plan is not None
        is_bound = asked.is_dynamic or asked.is_called
        fits = held <= expected if is_bound else held == expected
        check(fits, request_id, "held", held, "of", expected, "at", end)

    def _check_empty(self) -> None:
        """Check that nothing is left of any request; answers then change nothing."""
        for _, _, used in self.answers.waiting:
            self.scheduler.kv_policy_manager.give_back_surplus(used)
        planner = self.scheduler.kv_policy_planner
        check(not planner.states, "states left", planner.states)
        self._check_nothing_held()

    def _check_nothing_held(self) -> None:
        """Check that no request has a superblock or a query window."""
        planner, free = (
            self.scheduler.kv_policy_planner,
            self.pool.get_num_free_blocks(),
        )
        check(free == self.pool.num_gpu_blocks - 1, "pool not full:", free)
        check(not planner._windows, "windows left", planner._windows)
        windows = self.scheduler.kv_policy_manager._windows
        check(not windows, "windows left", windows)
        check(planner.num_global_blocks == 0, "global", planner.num_global_blocks)
        check(not self.scheduler.kv_policy_manager.req_to_blocks, "rows left")
