"""Classes that stand where vLLM's tests name vLLM's, and build ours when called."""

import itertools
import os
from abc import ABCMeta
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from typing import Any

from vllm.engine.arg_utils import EngineArgs
from vllm.plugins import load_general_plugins
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec

from tools.vllm_tests.record import Record
from vllm_kvpolicy.api.guards import REFUSALS
from vllm_kvpolicy.block_manager.manager import (
    KVPolicyManager,
    KVPolicySpec,
    own_manager,
)
from vllm_kvpolicy.block_manager.planner import Planner, RequestPlan
from vllm_kvpolicy.block_manager.scheduler import (
    KVPolicyAsyncScheduler,
    KVPolicyScheduler,
)
from vllm_kvpolicy.config import CONFIG_KEY, KVPolicyConfig
from vllm_kvpolicy.events import LAST_PHASE
from vllm_kvpolicy.policies.catalogue.names import parse
from vllm_kvpolicy.sizes import PlannerLimits, max_blocks_per_request

NEVER = 2**20  # tokens or superblocks that no test reaches
EVENTS_PER_STEP = 8
# Rows that ask for what the wrapped configuration of a server has and a test's has not.
UNASKED = ("custom worker classes", "custom scheduler classes")
_instances = itertools.count()


class Swap(ABCMeta):
    """The type of a subclass of vLLM's that differs from it where it is called.

    Tests that call its methods on mocks, or make an object without calling it, get
    vLLM's own.
    """

    stock: type
    build: Callable[..., Any]

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Build an object of ours, or of vLLM's."""
        return cls.build(*args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        """Return whether it is one of vLLM's class, as ours are."""
        return isinstance(instance, cls.stock)


class Swaps:
    """Builds our objects for tests, and knows those of the test that runs.

    Args:
        policy: plain form of the policy.

    Attributes:
        record: of the test that runs.
        schedulers: that it has built.
        classes: what takes the place of vLLM's classes, by these.
    """

    def __init__(self, policy: dict[str, Any]) -> None:
        self.policy, self.config = policy, KVPolicyConfig.from_dict(policy)
        self.record = Record("")
        self.schedulers: list[Any] = []
        builders = {
            Scheduler: partial(self._scheduler, Scheduler, KVPolicyScheduler),
            AsyncScheduler: partial(
                self._scheduler, AsyncScheduler, KVPolicyAsyncScheduler
            ),
            KVCacheManager: self._cache_manager,
            FullAttentionManager: self._full_attention_manager,
        }
        self.classes = {
            stock: Swap(stock.__name__, (stock,), {"stock": stock, "build": build})
            for stock, build in builders.items()
        }

    def _scheduler(
        self,
        stock: type,
        ours: type,
        vllm_config: Any,
        kv_cache_config: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        vllm_config.additional_config[CONFIG_KEY] = self.policy
        self._note_refusals(vllm_config)
        most = max_blocks_per_request(vllm_config, self.config)
        bounded = self._bounded(kv_cache_config, most)
        if bounded is None:
            return stock(vllm_config, kv_cache_config, *args, **kwargs)
        vllm_config.instance_id = f"vllm-tests-{os.getpid()}-{next(_instances)}"
        scheduler = ours(vllm_config, bounded, *args, **kwargs)
        self.schedulers.append(scheduler)
        return scheduler

    def serve(self) -> None:
        """Give the policy to engines that tests start."""
        load_general_plugins()
        create = EngineArgs.create_engine_config

        def create_engine_config(args: EngineArgs, *rest: Any, **kwargs: Any) -> Any:
            args.additional_config |= {CONFIG_KEY: self.policy}
            try:
                vllm_config = create(args, *rest, **kwargs)
            except ValueError as error:
                named = [row.name for row in REFUSALS if row.name in str(error)]
                self.record.refused += named
                raise
            self.record.ours += 1
            return vllm_config

        EngineArgs.create_engine_config = create_engine_config

    def _note_refusals(self, vllm_config: Any) -> None:
        rows = (row for row in REFUSALS if row.name not in UNASKED)
        found = {row.name for row in rows if row.applies(vllm_config)}
        self.record.refused = sorted({*self.record.refused, *found})

    def _bounded(self, kv_cache_config: Any, most: int) -> Any | None:
        """Return a configuration whose full attention is bounded, if it can be.

        Args:
            kv_cache_config: of a test.
            most: superblocks that a request may hold.
        """
        groups = list(kv_cache_config.kv_cache_groups)
        kinds = [type(group.kv_cache_spec) for group in groups]
        if kinds.count(KVPolicySpec) == 1:  # the test builds another engine of it
            self.record.ours += 1
            return kv_cache_config
        if kinds.count(FullAttentionSpec) != 1:
            self.record.stock.append(f"{[kind.__name__ for kind in kinds]}")
            return None
        index = kinds.index(FullAttentionSpec)
        spec = groups[index].kv_cache_spec
        values = {each.name: getattr(spec, each.name) for each in fields(spec)}
        bounded = KVPolicySpec(**values, max_blocks_per_request=most)
        groups[index] = replace(groups[index], kv_cache_spec=bounded)
        self.record.ours += 1
        return replace(kv_cache_config, kv_cache_groups=groups)

    def _cache_manager(
        self, kv_cache_config: Any, *args: Any, **kwargs: Any
    ) -> KVCacheManager:
        bounded = self._bounded(kv_cache_config, NEVER)
        if bounded is None:
            return KVCacheManager(kv_cache_config, *args, **kwargs)
        config = KVPolicyConfig.from_dict(self.policy | {"budget": NEVER})
        return PlanningCacheManager(config, bounded, *args, **kwargs)

    def _full_attention_manager(self, *args: Any, **kwargs: Any) -> KVPolicyManager:
        manager = KVPolicyManager(*args, **kwargs)
        limits = PlannerLimits(manager.block_size, EVENTS_PER_STEP)
        manager.attach(Planner(limits), parse(self.config.policy).placement)
        self.record.ours += 1
        return manager


class PlanningCacheManager(KVCacheManager):
    """A cache manager without a scheduler, which plans requests that never drop."""

    def __init__(
        self, config: KVPolicyConfig, kv_cache_config: Any, *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(kv_cache_config, *args, **kwargs)
        self._own, _ = own_manager(self.coordinator.single_type_managers)
        self._planner = Planner(PlannerLimits(self._own.block_size, EVENTS_PER_STEP))
        self._own.attach(self._planner, parse(config.policy).placement)
        self._config = config

    def get_computed_blocks(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """Plan the request, look it up."""
        self._plan(request)
        return super().get_computed_blocks(request, *args, **kwargs)

    def allocate_slots(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """Plan the request and its step, allocate."""
        self._plan(request)
        self._planner.clip(request.request_id, request.num_computed_tokens, NEVER)
        return super().allocate_slots(request, *args, **kwargs)

    def free(self, request: Any, *args: Any, **kwargs: Any) -> None:
        """Free what the request holds, forget its plan."""
        super().free(request, *args, **kwargs)
        self._planner.remove(request.request_id)

    def _plan(self, request: Any) -> None:
        if request.request_id in self._planner.states:
            return
        size = self._own.block_size
        footprint = self._config.footprint(
            request.num_prompt_tokens, size, 1, LAST_PHASE
        )
        plan = RequestPlan(
            policy=self._config.policy,
            footprint=footprint,
            sinks=self._config.sink_tokens,
            budget=NEVER,
        )
        self._planner.add(request.request_id, plan)
