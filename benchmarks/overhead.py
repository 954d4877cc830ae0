"""Times a policy against stock vLLM or another policy, both in this process.

Both cache prefixes, as vLLM does by default; prompts are new in every round. Without
HTTP and other processes, the difference is the policy's own work. Engines take
turns on the same requests. Without `--budget` the policy never has an event, and
nothing is reported unless outputs are equal.

    python -m benchmarks.overhead [--model DIR] [--policy ams-tova] [--pairs 25]
    python -m benchmarks.overhead --policy adakv-snapkv --beside snapkv --budget 128
"""

import argparse
import os
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.stats import median_ratio
from vllm_kvpolicy.config_keys import ALWAYS

MAX_MODEL_TOKENS = 2048
NUM_REQUESTS, OUTPUT_TOKENS = 8, 300
Round = tuple[float, float, list]
"""Wall seconds, CPU seconds and tokens of requests."""
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}


def make_engine(model: str, policy: str | None, budget: int, live: bool = False) -> Any:
    """Return an engine; without a policy it is stock vLLM, with `live` it may tell."""
    from vllm import LLM

    extra: dict[str, Any] = {}
    if policy is not None:
        values = {"policy": policy, "budget": budget, "interval": 64, "live": live}
        values["events"] = ALWAYS
        extra["additional_config"] = {"kv_policy": values}
    return LLM(
        model,
        dtype="float32",
        max_model_len=MAX_MODEL_TOKENS,
        max_num_seqs=16,
        enforce_eager=True,
        kv_cache_memory_bytes=128 << 20,
        block_size=32,
        seed=0,
        **extra,
    )


def run_round(engine: Any, number: int, output_tokens: int) -> Round:
    """Run one round of requests."""
    from vllm import SamplingParams, TokensPrompt

    rng = random.Random(number)
    lengths = [40 + 37 * index for index in range(NUM_REQUESTS)]
    prompts = [
        TokensPrompt(prompt_token_ids=[rng.randrange(10, 100) for _ in range(length)])
        for length in lengths
    ]
    params = SamplingParams(temperature=0, max_tokens=output_tokens, ignore_eos=True)
    wall, cpu = time.perf_counter(), time.process_time()
    outputs = engine.generate(prompts, params, use_tqdm=False)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return wall, cpu, [list(output.outputs[0].token_ids) for output in outputs]


def contest(
    names: Sequence[str],
    pairs: int,
    play: Callable[[str, int], Round],
    changes_nothing: str | None,
) -> None:
    """Let engines take turns; print throughputs over that of the first one.

    Args:
        play: runs the round of an engine; rounds below 0 warm up.
        changes_nothing: what must not change the tokens; None if it may.

    Raises:
        RuntimeError: it changed them.
    """
    base, *others = names
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for number in range(-1, pairs):
        order = names if number % 2 else names[::-1]
        rounds = {name: play(name, number) for name in order}
        alike = all(found[2] == rounds[base][2] for found in rounds.values())
        if changes_nothing and not alike:
            raise RuntimeError(f"round {number}: {changes_nothing} changed the tokens")
        if number >= 0:
            for name, (wall, cpu, _) in rounds.items():
                times[name].append((wall, cpu))
    for column, kind in enumerate(("wall", "CPU")):
        before = [pair[column] for pair in times[base]]
        for name in others:
            ratio = median_ratio(before, [pair[column] for pair in times[name]])
            print(
                f"{name} / {base}, tokens per {kind} second, {pairs} pairs: "
                f"{ratio.median:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"
            )


def main() -> None:
    """Print throughput ratios with bootstrap intervals."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="reasoner/checkpoint")
    parser.add_argument("--policy", default="ams-tova")
    parser.add_argument("--beside", metavar="NAME", help="policy; default: stock")
    parser.add_argument("--budget", type=int, default=MAX_MODEL_TOKENS, help="tokens")
    parser.add_argument("--output-tokens", type=int, default=OUTPUT_TOKENS)
    parser.add_argument("--pairs", type=int, default=25)
    options = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    base = options.beside or "stock"
    engines = {
        base: make_engine(options.model, options.beside, options.budget),
        options.policy: make_engine(options.model, options.policy, options.budget),
    }

    def play(name: str, number: int) -> Round:
        return run_round(engines[name], number, options.output_tokens)

    binds = options.budget < MAX_MODEL_TOKENS
    contest(list(engines), options.pairs, play, None if binds else "the policy")


if __name__ == "__main__":
    main()
