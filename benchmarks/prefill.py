"""Times the attention of a long prompt under write gates beside stock vLLM.

Both engines run in this process and take turns on the same random tokens. Gates have
random weights. Their threshold is chosen so that they admit the wanted share of the
tokens that leave the window, because the time depends on this share only.

    python -m benchmarks.prefill [--tokens 8192] [--kept 0.25] [--pairs 5] [--out FILE]
"""

import argparse
import json
import os
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.overhead import ENVIRONMENT
from benchmarks.provenance import collect
from benchmarks.stats import median_ratio
from vllm_kvpolicy.commands.outputs import new_file

WINDOW, INTERVAL = 256, 256
SEARCH_STEPS, NEAR = 12, 0.01


def make_engine(model: str, tokens: int, policy: dict[str, Any] | None) -> Any:
    """Return an engine for prompts of `tokens` tokens; without a policy it is stock."""
    from vllm import LLM

    return LLM(
        model,
        dtype="float32",
        max_model_len=tokens + 64,
        hf_overrides={"max_position_embeddings": 2 * tokens},
        max_num_seqs=1,
        max_num_batched_tokens=2048,
        enforce_eager=True,
        kv_cache_memory_bytes=512 << 20,
        block_size=32,
        enable_prefix_caching=False,
        additional_config={} if policy is None else {"kv_policy": policy},
    )


def core(engine: Any) -> Any:
    """Return vLLM's EngineCore."""
    return engine.llm_engine.engine_core.engine_core


@contextmanager
def attention_clock(engine: Any) -> Iterator[list[float]]:
    """Yield a list that gets the seconds of every call of an attention layer."""
    worker = core(engine).model_executor.driver_worker.worker
    layers = worker.vllm_config.compilation_config.static_forward_context
    implementations = [layer.impl for layer in layers.values()]
    seconds: list[float] = []

    def timed(forward: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            result = forward(*args, **kwargs)
            seconds.append(time.perf_counter() - started)
            return result

        return call

    for each in implementations:
        each.forward = timed(each.forward)
    try:
        yield seconds
    finally:
        for each in implementations:
            del each.forward


def read_prompt(engine: Any, tokens: int, seed: int) -> dict[str, float]:
    """Read a prompt of random tokens; return the seconds and the share kept."""
    from vllm import SamplingParams, TokensPrompt

    rng = random.Random(seed)
    prompt = [rng.randrange(10, 90) for _ in range(tokens)]
    counters = getattr(core(engine).scheduler, "kv_policy_counters", None)
    before = counters.read() if counters else {}
    with attention_clock(engine) as seconds:
        started = time.perf_counter()
        engine.generate(
            [TokensPrompt(prompt_token_ids=prompt)],
            SamplingParams(temperature=0, max_tokens=1, ignore_eos=True),
            use_tqdm=False,
        )
        found = {"seconds": time.perf_counter() - started}
    found["attention_seconds"] = sum(seconds)
    if counters:
        after = counters.read()
        found["event_seconds"] = after["event_seconds"] - before["event_seconds"]
        dropped = after["tokens_dropped"] - before["tokens_dropped"]
        found["kept"] = 1 - dropped / (tokens - WINDOW)
    return found


def write_gates(model: Path, path: Path) -> None:
    """Write gates of random weights for a model."""
    import torch

    from vllm_kvpolicy.policies.admissions.wgkv import Gates

    config = json.loads((model / "config.json").read_text())
    layers, heads = config["num_hidden_layers"], config["num_key_value_heads"]
    size, units = config["head_dim"], 3 * config["head_dim"] // 2
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(layers, *shape, generator=generator)

    weights = {
        "pre_norm": torch.ones(layers, size),
        "post_norm": torch.ones(layers, size),
        "first": draw(heads, units, 2 * size) / size**0.5,
        "first_bias": draw(heads, units),
        "second": draw(heads, units) / units**0.5,
        "second_bias": torch.zeros(layers, heads),
    }
    theta = config.get("rope_parameters", config).get("rope_theta", 1e4)
    gates = Gates(
        model="random",
        flavour=config["model_type"],
        num_layers=layers,
        num_kv_heads=heads,
        head_dim=size,
        rope_theta=theta,
        window=WINDOW,
        threshold=0.5,
        sinks=0,
        sparsity_weight=float("nan"),
        kept_fraction=float("nan"),
        tensors=Gates.unstacked(weights),
    )
    gates.save(path)


def search_threshold(engine: Any, tokens: int, kept: float) -> float:
    """Return the threshold at which about the share `kept` is admitted."""
    worker = core(engine).model_executor.driver_worker.worker
    (policy,) = worker.kv_policy_setup.policies.values()
    low, high = 0.0, 1.0
    for step in range(SEARCH_STEPS):
        policy.admission.threshold = (low + high) / 2
        share = read_prompt(engine, tokens, -1 - step)["kept"]
        if abs(share - kept) < NEAR:
            break
        low, high = (
            (policy.admission.threshold, high)
            if share > kept
            else (low, policy.admission.threshold)
        )
    return policy.admission.threshold


def main() -> None:
    """Print ratios to stock with bootstrap intervals."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="reasoner/checkpoint")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--kept", type=float, default=0.25, help="share of tokens")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--out", type=new_file)
    options = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "gates.safetensors"
        write_gates(Path(options.model), path)
        policy = {
            "policy": "wgkv",
            "recent": WINDOW,
            "interval": INTERVAL,
            "prefill_interval": INTERVAL,
            "policy_config": {"wgkv_gates": str(path)},
        }
        engines = {
            "stock": make_engine(options.model, options.tokens, None),
            "wgkv": make_engine(options.model, options.tokens, policy),
        }
    threshold = search_threshold(engines["wgkv"], options.tokens, options.kept)
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in engines}
    for number in range(-1, options.pairs):
        for name in list(engines) if number % 2 else list(reversed(engines)):
            found = read_prompt(engines[name], options.tokens, number)
            if number >= 0:  # the first round warms up
                rows[name].append(found)
    kept = [row["kept"] for row in rows["wgkv"]]
    print(f"kept {min(kept):.3f} to {max(kept):.3f} of what left the window")
    for key in ("attention_seconds", "seconds"):
        ours, theirs = ([row[key] for row in rows[name]] for name in ("wgkv", "stock"))
        ratio = median_ratio(ours, theirs)
        low, high = f"{ratio.low:.3f}", f"{ratio.high:.3f}"
        print(f"wgkv / stock, {key}: {ratio.median:.3f} [{low}, {high}]")
    if options.out is not None:
        record = {
            "provenance": collect(__spec__.name),
            "threshold": threshold,
            "rows": rows,
        }
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
