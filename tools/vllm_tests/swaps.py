"""Classes that stand where vLLM's tests name vLLM's, and build ours when called."""

import itertools
import json
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
from vllm.v1.engine.core import EngineCore
from vllm.v1.kv_cache_interface import FullAttentionSpec

from tools.vllm_tests import LEAST, leaks
from tools.vllm_tests.record import Record
from vllm_kvpolicy.api.guards import REFUSALS
from vllm_kvpolicy.block_manager.manager import (
    KVPolicyManager,
    KVPolicySpec,
    own_manager,
)
from vllm_kvpolicy.block_manager.other_groups import OtherBlocks
from vllm_kvpolicy.block_manager.planner import Planner
from vllm_kvpolicy.block_manager.scheduler import (
    KVPolicyAsyncScheduler,
    KVPolicyScheduler,
)
from vllm_kvpolicy.config import CONFIG_KEY
from vllm_kvpolicy.sizes import PlannerLimits

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
        engines: schedulers of all engines so far, with their events in earlier tests.
        classes: what takes the place of vLLM's classes, by these.
    """

    def __init__(self, policy: dict[str, Any]) -> None:
        self.policy = policy
        self.record = Record("")
        self.schedulers: list[Any] = []
        self.engines: dict[Any, int] = {}
        own = KVPolicyScheduler, KVPolicyAsyncScheduler
        builders = {
            Scheduler: partial(self._scheduler, Scheduler, own[0]),
            AsyncScheduler: partial(self._scheduler, AsyncScheduler, own[1]),
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
        own: type,
        vllm_config: Any,
        kv_cache_config: Any,
        **rest: Any,
    ) -> Any:
        vllm_config.additional_config[CONFIG_KEY] = self.policy
        rows = [row for row in REFUSALS if row.name not in UNASKED]
        self.record.refused += [row.name for row in rows if row.applies(vllm_config)]
        bounded = self._bounded(kv_cache_config)
        if bounded is None:
            return stock(vllm_config, kv_cache_config, **rest)
        vllm_config.instance_id = f"vllm-tests-{os.getpid()}-{next(_instances)}"
        scheduler = own(vllm_config, bounded, **rest)
        self.schedulers.append(scheduler)
        return scheduler

    def serve(self, server: Any) -> None:
        """Give the policy to servers that tests start; look at them at their end."""
        policy = self.policy | LEAST if "interval" in self.policy else self.policy
        start, end = server._start_server, server._shutdown

        def _start_server(self_: Any, model: str, words: list[str], *rest: Any) -> None:
            self.record.ours += 1
            given = ["--additional-config", json.dumps({CONFIG_KEY: policy})]
            start(self_, model, words + given, *rest)

        def _shutdown(self_: Any) -> None:
            try:
                if self_.proc.poll() is None:
                    _ask_for_more(self_.get_client())
                    found, num_events = leaks.find_served(self_.url_for("metrics"))
                    self.record.events += num_events
                    if bool(num_events) != ("interval" in policy):
                        found.append(f"{num_events} events")
                    if found:
                        raise ValueError(f"a server ends with {found}")
            finally:
                end(self_)

        server._start_server, server._shutdown = _start_server, _shutdown

    def run(self) -> None:
        """Give the policy to engines that tests run in their own process."""
        load_general_plugins()
        build = EngineCore.__init__

        def __init__(core: EngineCore, *args: Any, **kwargs: Any) -> None:
            build(core, *args, **kwargs)
            self.engines[core.scheduler] = 0

        EngineCore.__init__ = __init__
        create = EngineArgs.create_engine_config

        def create_engine_config(args: EngineArgs, *rest: Any, **kwargs: Any) -> Any:
            args.additional_config |= {CONFIG_KEY: self.policy}
            # VllmRunner, which most of these tests start, turns the first off, which a
            # policy refuses, and has pages of 128 tokens, more than a budget of MODES.
            args.enable_chunked_prefill = args.block_size = None
            try:
                vllm_config = create(args, *rest, **kwargs)
            except ValueError as error:
                named = [row.name for row in REFUSALS if row.name in str(error)]
                self.record.refused += named
                raise
            self.record.ours += 1
            return vllm_config

        EngineArgs.create_engine_config = create_engine_config

    def close(self) -> int:
        """Forget the schedulers of a test that ends; return how many events it had."""
        events = sum(each.kv_policy_planner.num_events for each in self.schedulers)
        for scheduler in self.schedulers:
            scheduler.kv_policy_counters.file.remove()
        self.schedulers.clear()
        for scheduler, earlier in self.engines.items():
            self.engines[scheduler] = scheduler.kv_policy_planner.num_events
            events += self.engines[scheduler] - earlier
        return events

    def _bounded(self, kv_cache_config: Any) -> Any | None:
        """Return a test's configuration with bounded full attention, if it can be."""
        groups = list(kv_cache_config.kv_cache_groups)
        kinds = [type(group.kv_cache_spec) for group in groups]
        if kinds.count(KVPolicySpec) == 1:  # the test builds another engine of it
            self.record.ours += 1
            return kv_cache_config
        if kinds.count(FullAttentionSpec) != 1:
            return None
        index = kinds.index(FullAttentionSpec)
        spec = groups[index].kv_cache_spec
        values = {each.name: getattr(spec, each.name) for each in fields(spec)}
        groups[index] = replace(groups[index], kv_cache_spec=KVPolicySpec(**values))
        self.record.ours += 1
        return replace(kv_cache_config, kv_cache_groups=groups)

    def _cache_manager(self, kv_cache_config: Any, **rest: Any) -> KVCacheManager:
        bounded = self._bounded(kv_cache_config)
        manager = KVCacheManager(bounded or kv_cache_config, **rest)
        if bounded:
            _attach(own_manager(manager.coordinator.single_type_managers)[0])
        return manager

    def _full_attention_manager(self, *args: Any, **kwargs: Any) -> KVPolicyManager:
        manager = KVPolicyManager(*args, **kwargs)
        _attach(manager)
        self.record.ours += 1
        return manager


def _ask_for_more(client: Any) -> None:
    """Ask a server for two texts that are long enough for events.

    Raises:
        ValueError: one has another length.
    """
    asked = {"model": client.models.list().data[0].id, "max_tokens": 96}
    asked |= {"temperature": 0, "extra_body": {"ignore_eos": True}}
    messages = [{"role": "user", "content": "Count to a hundred."}]
    answers = (
        client.completions.create(prompt="One, two,", **asked),
        client.chat.completions.create(messages=messages, **asked),
    )
    lengths = [answer.usage.completion_tokens for answer in answers]
    if lengths != 2 * [asked["max_tokens"]]:
        raise ValueError(f"expected texts of {asked['max_tokens']}, got {lengths}")


def _attach(manager: KVPolicyManager) -> None:
    """Have a manager without a scheduler plan for nobody, as where no policy is."""
    manager.attach(Planner(PlannerLimits(manager.block_size, 1)), OtherBlocks())
