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
from typing import Any

from benchmarks.stats import median_ratio
from vllm_kvpolicy.config_keys import ALWAYS

MAX_MODEL_TOKENS = 2048
NUM_REQUESTS, OUTPUT_TOKENS = 8, 300
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


def run_round(
    engine: Any, number: int, output_tokens: int
) -> tuple[float, float, list]:
    """Return wall seconds, CPU seconds and tokens of one round of requests."""
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
    binds = options.budget < MAX_MODEL_TOKENS
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
    for number in range(-1, options.pairs):
        order = list(engines) if number % 2 else list(reversed(engines))
        rounds = {
            name: run_round(engines[name], number, options.output_tokens)
            for name in order
        }
        if not binds and rounds[base][2] != rounds[options.policy][2]:
            raise RuntimeError(f"round {number}: the policy changed the tokens")
        if number >= 0:  # the first round warms up
            for name, (wall, cpu, _) in rounds.items():
                times[name].append((wall, cpu))
    for column, kind in enumerate(("wall", "CPU")):
        before, after = ([pair[column] for pair in times[name]] for name in engines)
        ratio = median_ratio(before, after)
        print(
            f"{options.policy} / {base}, tokens per {kind} second, {options.pairs} "
            f"pairs: {ratio.median:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"
        )


if __name__ == "__main__":
    main()
