"""vLLM's schedulers with events: clip steps, attach each step's commands.

A VllmConfig with a policy names these classes in place of vLLM's.
"""

import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

from vllm.logger import init_logger
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    generate_block_hash_extra_keys,
    hash_block_tokens,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.metrics.perf import ModelMetrics, PerfStats
from vllm.v1.request import Request, RequestStatus

from vllm_kvpolicy.block_manager.counting import CountingMixin
from vllm_kvpolicy.block_manager.entry import Entry
from vllm_kvpolicy.block_manager.manager import own_manager
from vllm_kvpolicy.block_manager.other_groups import OtherBlocks, run_events_first
from vllm_kvpolicy.block_manager.planner import Planner, RequestPlan, RequestState
from vllm_kvpolicy.config_keys import PRESSURE
from vllm_kvpolicy.events import request_phase
from vllm_kvpolicy.observe.metrics import CAUSES, LIVE
from vllm_kvpolicy.observe.shared_files import own_engine
from vllm_kvpolicy.observe.snapshots import Snapshots
from vllm_kvpolicy.protocol import CompactEvent
from vllm_kvpolicy.sizes import (
    capacity_line,
    check_drafts,
    footprint_of,
    other_groups,
    planner_limits,
    settled,
    sharing_line,
)

logger = init_logger("vllm.kv_policy")


def lookahead_hasher(cache_config: Any) -> Callable[[Request], list[BlockHash]] | None:
    """Return a hasher that counts the token after a superblock as part of it.

    With some admissions a token decides whether the one before it is kept. The decision
    about the last token of a superblock is stored with the superblock, so that only
    requests that go on with the same token may share it. vLLM 0.33 has the same for
    drafters (`num_hash_lookahead_tokens`).

    Example: superblocks of 4 tokens. The prompts `abcdefgh x` and `abcdefgh y` share
    `abcd`, which `e` follows in both, but not `efgh`.

    Returns:
        What a request calls for its new hashes; its last superblock has one when the
        token after it is known. None without prefix caching.
    """
    if not cache_config.enable_prefix_caching:
        return None
    block_size = cache_config.block_size
    hash_function = get_hash_fn_by_name(cache_config.prefix_caching_hash_algo)

    def new_hashes(request: Request) -> list[BlockHash]:
        known, tokens = request.block_hashes, request.all_token_ids
        before = known[-1] if known else None
        hashes = []
        last = request.num_tokens - block_size  # a token has to follow the superblock
        for start in range(len(known) * block_size, last, block_size):
            end = start + block_size
            keys, _ = generate_block_hash_extra_keys(request, start, end, 0)
            keys = (*(keys or ()), tokens[end])
            before = hash_block_tokens(hash_function, before, tokens[start:end], keys)
            hashes.append(before)
        return hashes

    return new_hashes


class HeldMetrics(ModelMetrics):
    """Estimates operations and bytes by what the requests of a step hold.

    A sliding window that is longer than that counts as so long, too.
    """

    def get_step_perf_stats_per_gpu(
        self, scheduler_output: SchedulerOutput
    ) -> PerfStats:
        """Return the estimate for a step that says what its requests have dropped."""
        cached = scheduler_output.scheduled_cached_reqs
        pairs = zip(
            cached.num_computed_tokens, scheduler_output.kv_policy_dropped, strict=True
        )
        held = [computed - dropped for computed, dropped in pairs]
        cached = replace(cached, num_computed_tokens=held)
        return super().get_step_perf_stats_per_gpu(
            replace(scheduler_output, scheduled_cached_reqs=cached)
        )


class KVPolicySchedulerMixin(CountingMixin):
    """Adds events to a vLLM scheduler."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        num_blocks = self.kv_cache_manager.block_pool.num_gpu_blocks
        self.kv_policy_config = settled(self.vllm_config, num_blocks)
        policy = self.kv_policy_config.resolved().info
        coordinator = self.kv_cache_manager.coordinator
        manager, beside = own_manager(coordinator.single_type_managers)
        if beside:
            run_events_first(coordinator, manager)
        self.kv_policy_limits = planner_limits(self.vllm_config, self.kv_policy_config)
        self.kv_policy_planner = Planner(self.kv_policy_limits)
        self.kv_policy_manager = manager
        others = OtherBlocks(
            other_groups(self.vllm_config), beside, self._num_processed
        )
        manager.attach(self.kv_policy_planner, others, policy.placement)
        manager.offers[0].count_past_events(self.kv_cache_manager)
        manager.lookahead_tokens = self.num_lookahead_tokens
        manager.most_tokens = self.max_model_len
        logger.info(capacity_line(self.vllm_config, self.kv_policy_config, num_blocks))
        logger.info(sharing_line(self.vllm_config, self.kv_policy_config))
        self.kv_policy_entry = Entry(
            self.kv_policy_planner,
            manager,
            self.max_model_len,
            step_tokens=self.max_num_scheduled_tokens,
            late_steps=int(self.scheduler_config.async_scheduling or False),
            by_priority=self.policy == SchedulingPolicy.PRIORITY,
            watermark=self.kv_cache_manager.watermark_blocks,
            num_drafts=self.vllm_config.num_speculative_tokens,
            window_tokens=max(
                each.window_tokens for each in self.kv_policy_config.all_resolved
            ),
            calls_events=self.kv_policy_config.events == PRESSURE,
            chunk_tokens=self.scheduler_config.long_prefill_token_threshold,
        )
        if self.kv_policy_entry.calls_events:
            floor = self.kv_policy_config.budget_tokens
            self.kv_policy_counters.set(floor_tokens=floor)
            self.kv_policy_counters.tell()
        if self.perf_metrics is not None:
            self.perf_metrics = HeldMetrics(self.vllm_config)
        self.kv_policy_snapshots: Snapshots | None = None
        if self.kv_policy_config.live:
            self.kv_policy_snapshots = Snapshots(
                own_engine(self.vllm_config),
                self.kv_policy_config.live_text,
                partial(self.kv_policy_counters.note_off, LIVE),
            )
        self._may_mask = self.kv_policy_config.is_exact  # parsed once, not every step
        self._sees_all: set[str] = set()
        self._is_closed = False  # to more waiting requests in this step
        self._masked_salt = secrets.token_hex()  # no request can name it
        self._lookahead_hasher = None
        if any(word.decides_later for word in self.kv_policy_config.words):
            self._lookahead_hasher = lookahead_hasher(self.vllm_config.cache_config)
            manager.offers_later = True

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Schedule a step; events that the pool needs are called for before it."""
        if self.kv_policy_entry.calls_events:
            self.kv_policy_entry.foresee(self._may_enter())
        return super().schedule(*args, **kwargs)

    def _may_enter(self) -> list[Request]:
        """Return the waiting requests that vLLM lets in if there is room, in order.

        It passes over those that wait for something else, such as a grammar.
        """
        if self.pause_state != PauseState.UNPAUSED:
            return []
        places = self.max_num_active_reqs - len(self.running)
        places -= self.num_waiting_for_streaming_input
        adapters = self._adapters()
        able = (
            request
            for request in self.waiting
            if not self._is_blocked_waiting_status(request.status)
            and (not request.num_stale_output_tokens or request.drop_stale_output)
            and self._has_slot(request, adapters)
        )
        return list(islice(able, max(places, 0)))

    def _adapters(self) -> set[int]:
        """Return the LoRA adapters of the requests that run."""
        if not self.lora_config:
            return set()
        asked = (request.lora_request for request in self.running)
        return {each.lora_int_id for each in asked if each is not None}

    def _has_slot(self, request: Request, adapters: set[int]) -> bool:
        """Return whether a waiting request's adapter has a slot; if so, add it.

        Args:
            adapters: that have slots.
        """
        asked = request.lora_request
        if not self.lora_config or asked is None:
            return True
        is_free = len(adapters) < self.lora_config.max_loras
        if is_free:
            adapters.add(asked.lora_int_id)
        return asked.lora_int_id in adapters

    def add_request(self, request: Request) -> None:
        """Queue a request and plan its events."""
        self._plan_request(request)
        super().add_request(request)

    def _plan_request(self, request: Request) -> None:
        request_id, params = request.request_id, request.sampling_params
        extra_args = params.extra_args if params is not None else None
        whole = request.num_prompt_tokens + request.max_tokens
        lengths = request.num_prompt_tokens, min(whole, self.max_model_len)
        known = self.kv_policy_limits.block_size, lengths
        try:
            config = self.kv_policy_config.with_request(extra_args, *known)
            if config is not None:
                check_drafts(config, self.vllm_config, "kv_")
        except ValueError as error:
            # The API process refuses such a request; one that reaches the engine by
            # another door must not take the engine down.
            logger.warning(
                "request %s keeps the server's policy: %s", request_id, error
            )
            config = self.kv_policy_config.with_request(None, *known)
        is_masked = config is not None and config.resolved().is_exact
        if not is_masked:
            self._sees_all.add(request_id)
        if request_id in self.requests:
            return
        self._hash(request, is_masked)
        if config is None:
            return
        info, prompt_tokens = config.resolved().info, request.num_prompt_tokens
        pinned = config.pinned_tokens(prompt_tokens)
        # A prompt of embeddings is known by its length alone.
        prompt = request.prompt_token_ids or [prompt_tokens]
        phase = request_phase(prompt, None if params is None else params.seed)
        block_size = self.kv_policy_limits.block_size
        plan = RequestPlan(
            policy=config.policy,
            footprint=footprint_of(self.vllm_config, config, prompt_tokens, phase),
            sinks=max(config.sink_tokens, pinned),
            takes_hits=not info.measures_tokens,
            budget=None if info.is_unbounded else config.budget_tokens,
            num_drafts=self.vllm_config.num_speculative_tokens,
            is_called=config.events == PRESSURE and not info.is_unbounded,
            ceiling=config.ceiling_tokens and config.ceiling_tokens + pinned,
            hints=config.hints_of(prompt_tokens, block_size),
        )
        self.kv_policy_planner.add(request_id, plan)

    def _hash(self, request: Request, is_masked: bool) -> None:
        """Hash a request's superblocks anew where KV is not a function of its tokens.

        Where attention masks tokens at once, hidden states behind the window, and so
        keys and values, are not those of full attention: such requests share only
        among themselves. Where tokens decide about the token before them, see
        `lookahead_hasher`.
        """
        if is_masked:
            request.cache_salt = f"{self._masked_salt}{request.cache_salt or ''}"
        if self._lookahead_hasher is not None:
            request._block_hasher = self._lookahead_hasher
        if is_masked or self._lookahead_hasher is not None:
            request.block_hashes.clear()
            request.update_block_hashes()

    def _get_local_prefix_cache_hit(
        self, request: Request, *limits: Any
    ) -> tuple[Any, ...]:
        """Look a request up in the prefix cache; take no more than its plan allows.

        vLLM 0.33 passes an upper bound of its own, in tokens.
        """
        state = self.kv_policy_planner.states.get(request.request_id)
        if state is not None and not state.plan.takes_hits:
            return self.kv_cache_manager.empty_kv_cache_blocks, 0, 0, False
        found = super()._get_local_prefix_cache_hit(request, *limits)
        if state is not None:
            found = self._cut_hit(request, state, *found)
        own = found[0].blocks[self.kv_policy_manager.kv_cache_group_id]
        leaving = self._outranked(request)
        self.kv_policy_entry.shared.note_hit(request.request_id, own, leaving)
        return found

    def _cut_hit(
        self,
        request: Request,
        state: RequestState,
        blocks: KVCacheBlocks,
        num_cached: int,
        junction: int,
        *rest: Any,
    ) -> tuple[Any, ...]:
        """Return a hit cut at what a request may take.

        Where it is cut, layers with a sliding window or a state have to have the window
        or the state there in the cache. Where they do not, the hit ends with the last
        that they have, and the request computes and caches the one that it misses:
        vLLM's `shared_prefix_boundary` names its end.

        Args:
            blocks: found in the cache, by group.
            junction: end of a longer prefix, where full attention has one; else 0.
        """
        usable, cache = state.usable_hit(num_cached), self.kv_cache_manager
        most = state.usable_hit(max(junction, num_cached))
        if usable < num_cached and self.kv_policy_manager.others.managers:
            hit, usable, _ = cache.coordinator.find_longest_cache_hit(
                request.block_hashes, usable
            )
            blocks = cache.create_kv_cache_blocks(hit)
        elif usable < num_cached:
            blocks = cache.truncate_computed_blocks(blocks, usable)
        return (blocks, usable, most if most > usable else 0, *rest)

    def _mamba_block_aligned_split(
        self, request: Request, num_new_tokens: int, *cached: int
    ) -> int:
        """End a chunk of a prompt where its states can be found again.

        vLLM saves the states at the end of a chunk, and ends one where the same prompt,
        sent again, would go on. A policy lets it go on earlier (`usable_hit`).

        Args:
            cached: tokens that caches give it, of a request that has just started.
        """
        count = super()._mamba_block_aligned_split(request, num_new_tokens, *cached)
        state = self.kv_policy_planner.states.get(request.request_id)
        if state is None:
            return count
        size, last = self.kv_policy_limits.block_size, request.num_prompt_tokens - 1
        resumed = state.usable_hit(last) // size
        if resumed == last // size:  # where vLLM has it go on, too
            return count
        before = resumed * size - request.num_computed_tokens - sum(cached)
        return min(count, before) if before > 0 else count

    def _reserve_prefill_lookahead(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int
    ) -> int:
        """Clip a step at the request's next event; vLLM asks for every request.

        0 keeps a waiting request waiting, and lets a running one sit this step out.
        """
        num_new_tokens = super()._reserve_prefill_lookahead(
            request, num_computed_tokens, num_new_tokens
        )
        planner, entry = self.kv_policy_planner, self.kv_policy_entry
        is_running = request.status == RequestStatus.RUNNING
        computed = num_computed_tokens
        # With asynchronous scheduling, drafts count as computed until they are not.
        is_verified = not self.num_spec_tokens or request.num_output_placeholders < 2
        count = planner.clip(request.request_id, computed, num_new_tokens, is_verified)
        if not (count or is_verified):  # it waits for its drafts, not for new ones
            request.spec_token_ids = []
        if count > 0:
            if is_running:
                count = entry.allowed(request, computed, count, self._victim)
            else:
                outranked = self._outranked(request)
                count = entry.admits(request, computed, count, outranked)
            if count <= 0:
                planner.sit_out(request.request_id)
            elif is_running:
                entry.follow(request, computed, count)
        self._is_closed |= count <= 0 and not is_running
        return count

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        """Return whether a waiting request may be looked at in this step.

        Requests enter in vLLM's order: none overtakes one that had to wait for room,
        which it would have to do for ever. vLLM 0.32 stops at such a request by itself;
        0.33 goes on to the next. And vLLM counts the adapters of this step's requests
        alone, though a running one that sits it out comes back with its own.
        """
        may_enter = not self._is_closed and self._has_slot(request, self._adapters())
        return may_enter and super()._handle_blocked_waiting_request(request)

    def set_pause_state(self, pause_state: PauseState) -> None:
        """Pause or go on; while paused, nobody makes way for a request that waits."""
        super().set_pause_state(pause_state)
        if pause_state != PauseState.UNPAUSED:
            self.kv_policy_entry.claim = None

    def _num_processed(self, request_id: str) -> int:
        """Return how many tokens of a request finished steps have computed."""
        request = self.requests[request_id]
        return request.num_computed_tokens - request.num_in_flight_tokens

    def _outranked(self, request: Request) -> frozenset[str]:
        """Return the running requests that vLLM preempts before one as urgent as this.

        Of those of one priority none makes way for another: they fit together.
        """
        if self.policy != SchedulingPolicy.PRIORITY:
            return frozenset()
        less_urgent = (
            each for each in self.running if each.priority > request.priority
        )
        return frozenset(each.request_id for each in less_urgent)

    def _victim(self) -> Request:
        """Return the running request that vLLM would preempt."""
        if self.policy == SchedulingPolicy.PRIORITY:
            return max(
                self.running, key=lambda each: (each.priority, each.arrival_time)
            )
        return self.running[-1]

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        """Attach the step's commands to the output that the workers receive."""
        self._is_closed = False
        commands = self.kv_policy_planner.finish_step(
            scheduler_output.num_scheduled_tokens
        )
        if self._may_mask:
            scheduled = scheduler_output.num_scheduled_tokens.keys()
            exempt = frozenset(self._sees_all & scheduled)
            commands = replace(commands, exempt=exempt)
        scheduler_output.kv_policy_commands = commands
        scheduler_output.new_block_ids_to_zero = _unwritten(
            scheduler_output.new_block_ids_to_zero, commands.events
        )
        if self.perf_metrics is not None:
            names = scheduler_output.scheduled_cached_reqs.req_ids
            dropped = self.kv_policy_planner.dropped_tokens(names)
            scheduler_output.kv_policy_dropped = dropped
        self.kv_policy_entry.finish_step(scheduler_output.num_scheduled_tokens)
        if self.kv_policy_snapshots is not None:
            self.kv_policy_snapshots.publish_tokens(commands.events, self.requests)
        super()._update_after_schedule(scheduler_output)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: Any
    ) -> Any:
        """Take the step's results, the workers' answers to events first."""
        answers = getattr(model_runner_output, "kv_policy_answers", ())
        for used in answers:
            self.kv_policy_manager.give_back_surplus(used)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        # Now that the token which the step has sampled is known.
        for used in answers if self.kv_policy_entry.calls_events else ():
            self.kv_policy_entry.rebook(used.request_id)
        return outputs

    def _note_gauges(self) -> None:
        counters, manager = self.kv_policy_counters, self.kv_policy_manager
        entry, (local, survivors) = self.kv_policy_entry, manager.pool_counts()
        calls = entry.pressure.num_calls
        counters.set(
            local_blocks=local,
            global_blocks=survivors,
            blocks_returned=manager.blocks_returned,
            held_back=entry.num_held_back,
            waits=entry.num_waits,
            foreseen_blocks=entry.forecast.most(),
            level_tokens=entry.pressure.level or 0,
            **{f"called_events_{cause}": calls[cause] for cause in CAUSES},
        )

    def _count(self, at_once: bool = False) -> None:
        super()._count(at_once)
        if self.kv_policy_snapshots is not None:
            self.kv_policy_snapshots.publish(self)

    def _held_and_computed(self) -> Iterator[tuple[int, int]]:
        states = self.kv_policy_planner.states
        for request_id in states.keys() & self.requests.keys():
            computed = self.requests[request_id].num_computed_tokens
            yield computed - states[request_id].dropped_tokens, computed

    def _most_held(self, request_id: str) -> int:
        state = self.kv_policy_planner.states.get(request_id)
        earlier = 0 if state is None else state.most_held
        return max(self.kv_policy_manager.num_held(request_id), earlier)

    def _ended(self, request_id: str) -> dict[str, int]:
        if not self.kv_policy_entry.is_bounded(request_id):
            return {}
        is_uncut = self.kv_policy_planner.states[request_id].is_uncut
        return {"bounded_requests": 1, "uncut_requests": int(is_uncut)}

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        if not kwargs.get("drop_stale_output"):  # as it is where users reset the cache
            running = [request, *self.running]
            is_bounded = self.kv_policy_entry.is_bounded
            all_bounded = all(is_bounded(each.request_id) for each in running)
            kind = "bounded" if all_bounded else "unbounded"
            self.kv_policy_counters.add(**{f"preemptions_{kind}": 1})
            if self.kv_policy_snapshots is not None:
                self.kv_policy_snapshots.publish_preemption(request)
        self.kv_policy_manager.withdraw(request.request_id)
        super()._preempt_request(request, *args, **kwargs)
        self.kv_policy_entry.leave(request)
        self.kv_policy_planner.restart(request.request_id)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        report = self._report(request)
        kv_params, *others = super()._free_request(request, *args, **kwargs)
        return (report or kv_params, *others)

    def _forget(self, request: Request) -> None:
        self.kv_policy_entry.leave(request)
        self.kv_policy_planner.remove(request.request_id)
        self._sees_all.discard(request.request_id)

    def _report(self, request: Request) -> dict[str, Any] | None:
        """Return what an answer says of its hints and events; None for nothing.

        It takes the place of what KV connectors say, which no server with a policy has.
        """
        state = self.kv_policy_planner.states.get(request.request_id)
        if state is None:
            return None
        said: dict[str, Any] = {}
        if state.plan.hints:
            said["hints"] = state.plan.hints.said(request.num_tokens)
        if self.kv_policy_config.report_events:
            said["dropped"] = list(state.dropped.values())
            if state.earlier:
                said["before_preemption"] = list(state.earlier)
        if said and state.pinned:
            said["pinned"] = state.pinned_tokens
        return {"kv_policy": said} if said else None

    def shutdown(self) -> None:
        """Stop; what the engine tells others ends with it."""
        super().shutdown()
        if self.kv_policy_snapshots is not None:
            self.kv_policy_snapshots.ring.remove()


def _unwritten(
    new_blocks: list[int] | None, events: Sequence[CompactEvent]
) -> list[int] | None:
    """Return which new superblocks a worker may set to zeros in its forward pass.

    Events run before that. One may have put survivors where a request had a new
    superblock earlier in this step, until vLLM preempted it.
    """
    if not (new_blocks and events):
        return new_blocks
    written = {block for event in events for block in event.dest_blocks}
    return [block for block in new_blocks if block not in written] or None


class KVPolicyScheduler(KVPolicySchedulerMixin, Scheduler):
    """Synchronous scheduling with events."""


class KVPolicyAsyncScheduler(KVPolicySchedulerMixin, AsyncScheduler):
    """Asynchronous scheduling with events; positions include tokens in flight."""
