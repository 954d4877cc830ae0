"""Times what an event decides on a CPU: in C++, and the references beside them.

    python -m benchmarks.kernels.bench_decision [--policy ams-tova] [--threads 2]

Ends with status 2 where the kernels for CPUs were not built. The shape is that of
SmolLM2-135M: 30 layers, 9 query heads, 3 KV heads of 64 channels, pages of 32 tokens
whose keys are stored as columns. One request has its second event. Both choose the same
tokens, or the run stops. The two take turns.

Each line is one JSON record. `milliseconds` is the median of the time on the clock,
`cpu_milliseconds` of the time on all cores, which says more on a busy machine. The
stage "all" is the policy's whole decision; the others are operations, and "rest" is
what lies between them.
"""

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from benchmarks import provenance
from benchmarks.gpu.kernel_checks import forced
from vllm_kvpolicy.kernels.dispatch import Operation
from vllm_kvpolicy.kernels.paged import PagedTokens
from vllm_kvpolicy.kernels.preferences import why_not_in_cpp
from vllm_kvpolicy.policies import compose as factory
from vllm_kvpolicy.policies.base import EventInputs, Policy

MODULE = "benchmarks.kernels.bench_decision"
LAYERS, HEADS, GROUP, SIZE, PAGE = 30, 3, 3, 64, 32
SINKS, RECENT, INTERVAL = 4, 32, 128
WHICH = ("reference", "cpu")
# By stage, (milliseconds, CPU milliseconds) of each run.
Times = dict[str, list[tuple[float, float]]]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policy", default="ams-tova")
    parser.add_argument("--tokens", type=int, default=640)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=30)
    return parser.parse_args()


def make_inputs(policy: Policy, num_tokens: int, dtype: torch.dtype) -> EventInputs:
    """Return random inputs of an event of one request."""
    generator = torch.Generator().manual_seed(num_tokens)
    shape = (1, LAYERS, HEADS, num_tokens)
    per_head = -(-num_tokens // PAGE)
    num_pages = LAYERS * HEADS * per_head
    columns = torch.randn(num_pages, SIZE, PAGE, generator=generator)
    pools = [columns.to(dtype).transpose(1, 2)] * LAYERS
    pages = torch.randperm(num_pages, generator=generator).view(*shape[:3], per_head)
    saved = (LAYERS, 1, policy.needs.window_tokens, HEADS * GROUP, SIZE)
    queries = torch.randn(saved, generator=generator).to(dtype)
    token = torch.arange(num_tokens)
    must_keep = (token < SINKS) | (token >= num_tokens - RECENT)
    memory = torch.rand(shape, generator=generator) / num_tokens
    return EventInputs(
        lengths=torch.full(shape[:3], num_tokens),
        must_keep=must_keep.expand(shape),
        end=torch.tensor([num_tokens + INTERVAL]),
        scale=SIZE**-0.5,
        keys=PagedTokens(pools, pages, num_tokens),
        queries=queries.permute(1, 0, 3, 2, 4),
        positions=token.expand(shape),
        prompt_lengths=torch.tensor([SINKS]),
        memory=dict.fromkeys(policy.needs.memory, memory),
        fresh_tokens=INTERVAL,
    )


def timed(run: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Return the result of a call and its (milliseconds, CPU milliseconds)."""
    start, spent = time.perf_counter(), time.process_time()
    result = run(*args, **kwargs)
    spent = time.process_time() - spent
    return result, ((time.perf_counter() - start) * 1e3, spent * 1e3)


def decide(
    policy: Policy, inputs: EventInputs, budget: int, which: str, times: Times
) -> torch.Tensor:
    """Let the policy choose; note what each stage took. Returns what it keeps."""
    call, within = Operation.__call__, [0.0, 0.0]

    def watched(self: Operation, *args: Any, **kwargs: Any) -> Any:
        result, spent = timed(call, self, *args, **kwargs)
        times[self.name].append(spent)
        within[:] = map(sum, zip(within, spent, strict=True))
        return result

    # A copy of the keys is made at each event.
    inputs.paged("keys").__dict__.pop("dense", None)
    with forced(which), mock.patch.object(Operation, "__call__", watched):
        decision, spent = timed(policy.decide, inputs, budget)
    times["all"].append(spent)
    times["rest"].append((spent[0] - within[0], spent[1] - within[1]))
    return decision.keep


def main() -> None:
    args = parse_args()
    if reason := why_not_in_cpp():
        print(f"bench_decision: {reason}", file=sys.stderr)
        sys.exit(2)
    torch.set_num_threads(args.threads)
    policy = factory.build(args.policy)
    inputs = make_inputs(policy, args.tokens, getattr(torch, args.dtype))
    found: dict[str, Times] = {which: defaultdict(list) for which in WHICH}
    budget = args.tokens - INTERVAL
    for _ in range(args.repeats + 1):
        want, got = (
            decide(policy, inputs, budget, which, found[which]) for which in WHICH
        )
        if not torch.equal(got, want):
            sys.exit(f"{args.policy}: chooses other tokens than the references")
    made_with = provenance.collect(MODULE)
    for stage in found["cpu"]:
        record: dict[str, Any] = {"policy": args.policy, "stage": stage}
        for which in WHICH:
            runs = found[which][stage][1:]  # the first one is not counted
            for name, spent in zip(("", "cpu_"), zip(*runs, strict=True), strict=True):
                record[f"{name}milliseconds_{which}"] = round(
                    statistics.median(spent), 3
                )
        print(json.dumps(record | vars(args) | made_with), flush=True)


if __name__ == "__main__":
    main()
