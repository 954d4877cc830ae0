"""Runs a few policies on one of vLLM's model runners, on a machine without a GPU.

Called as a program by test_v2_runner, because `v2` changes the process for good:
Triton's interpreter stands in for a GPU, and vLLM is told to use Triton attention on
the CPU platform. float32 only, tiny models only.

Usage, in tests/:
    python -m support.engine.run_policies v1|v2 MODEL TRACES OUTPUT.json [all]
"""

import json
import os
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ON_V2 = sys.argv[1] == "v2"
os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1")
if ON_V2:
    os.environ.update(TRITON_INTERPRET="1", VLLM_USE_V2_MODEL_RUNNER="1")

import torch  # noqa: E402
import triton  # noqa: E402
from triton import backends  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402

from support.interpreter import patch_once  # noqa: E402

BLOCK_SIZE = 32
NUM_TOKENS = 12
PROMPT_LENGTHS = (60, 90)
ENGINE = {
    "dtype": "float32",
    "max_model_len": 128,
    "max_num_seqs": 4,
    "block_size": BLOCK_SIZE,
    "enforce_eager": True,
    "enable_prefix_caching": False,
    "max_num_batched_tokens": 48,
    "kv_cache_memory_bytes": 8 << 20,
    "seed": 0,
}
# Policies that run as where attention is the replay of a graph.
CAPTURED = ("ams-tova", "hard-snapkv")
SHARED = ("policy", "policy_config", "budget", "interval", "events", "recent")
SHARED += ("prefill_interval",)
FP8 = {"kv_cache_dtype": "fp8"}
MOVERS = ("identity", "ragged identity")
KV_POLICY = {
    "budget": 48,
    "interval": 16,
    "events": "always",
    "recent": 8,
    "prefill_interval": 64,
}


# Answers what vLLM asks of a Triton driver; nothing is compiled or launched, and all
# configurations are equally fast.
DRIVER = SimpleNamespace(
    is_active=lambda: True,
    map_python_to_cpp_type=lambda kind: kind,
    get_current_target=lambda: GPUTarget("cpu", 0, 0),
    get_current_device=lambda: 0,
    get_current_stream=lambda device=0: 0,
    get_active_torch_device=lambda: torch.device("cpu"),
    get_benchmarker=lambda: lambda *args, **kwargs: [1.0, 1.0, 1.0],
)


def install(attention_backend: str) -> None:
    """Make this process look like one with a GPU that runs Triton."""
    backends.backends["cpu"] = SimpleNamespace(compiler=None, driver=DRIVER)
    triton.runtime.driver.set_active(DRIVER)
    properties = SimpleNamespace(
        multi_processor_count=8, name="interpreter", major=9, minor=0
    )
    patch_once()
    torch.cuda.get_device_capability = lambda *args, **kwargs: (9, 0)
    torch.cuda.get_device_properties = lambda *args, **kwargs: properties
    from vllm.platforms import current_platform
    from vllm.v1.attention.ops import triton_reshape_and_cache_flash

    triton_reshape_and_cache_flash._is_supported_kv_cache_dtype = lambda dtype: True
    type(current_platform).get_attn_backend_cls = classmethod(
        lambda cls, *args, **kwargs: attention_backend
    )


def count_builds() -> dict[str, int]:
    """Count how often our metadata builder really replaces the tables."""
    from vllm_kvpolicy.worker.backends.mixins import KVPolicyMetadataBuilderMixin
    from vllm_kvpolicy.worker.tiers.equal import EqualTier

    counts = {"builds": 0, "physical": 0, "folded": 0}
    build, describe = KVPolicyMetadataBuilderMixin.build, EqualTier.metadata

    def counting(self: Any, prefix: int, metadata: Any, *args: Any, **kw: Any) -> Any:
        counts["builds"] += 1
        built = build(self, prefix, metadata, *args, **kw)
        counts["folded"] += hasattr(built, "kv_policy_folded")
        return built

    def describing(self: EqualTier, step: Any) -> Any:
        found = describe(self, step)
        counts["physical"] += found.common is not step.metadata
        return found

    KVPolicyMetadataBuilderMixin.build = counting
    EqualTier.metadata = describing
    return counts


def count_hits() -> list[int]:
    """Collect how many tokens each request takes from the prefix cache from now on."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    found: list[int] = []
    record = KVCacheManager.record_prefix_cache_stats

    def recorded(self: KVCacheManager, request: Any, num_hits: int) -> None:
        found.append(num_hits)
        record(self, request, num_hits)

    KVCacheManager.record_prefix_cache_stats = recorded
    return found


def note_signals() -> dict[str, list[list[float]]]:
    """Collect what the worker measures at each token, by request: [signal, token].

    Of the last engine that ran.
    """
    from vllm_kvpolicy.worker.captures.token_signals import TokenSignals

    found: dict[str, list[list[float]]] = {}
    plan, end_step = TokenSignals.plan, TokenSignals.end_step
    ends: dict[str, int] = {}

    def planned(self: TokenSignals, step: Any) -> None:
        plan(self, step)
        lengths = step.metadata.seq_lens.tolist()
        ends.update(zip(step.request_ids, lengths, strict=False))

    def collected(self: TokenSignals) -> None:
        end_step(self)
        for request_id, end in ends.items():
            rows = self.values(torch.from_numpy(self.rows_of([request_id])), end)
            name = request_id.split("-")[0]
            found[name] = [row[0].tolist() for row in rows.values()]
        ends.clear()

    TokenSignals.plan, TokenSignals.end_step = planned, collected
    return found


def generate(
    model: str, policy: dict[str, Any] | None, common: int = 0, **changes: Any
) -> tuple[list[list[int]], int]:
    """Return greedy tokens of the fixed prompts and the number of events.

    Args:
        common: leading tokens that are the same in all prompts.
    """
    from vllm import LLM, SamplingParams, TokensPrompt

    options = {**ENGINE, **changes}
    if policy is not None:
        options["additional_config"] = {"kv_policy": policy}
    rng = random.Random(1)
    prompts = [[rng.randrange(5, 60) for _ in range(n)] for n in PROMPT_LENGTHS]
    prompts = [prompts[0][:common] + prompt[common:] for prompt in prompts]
    llm = LLM(model, **options)
    outputs = llm.generate(
        [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts],
        SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True),
        use_tqdm=False,
    )
    core = llm.llm_engine.engine_core.engine_core
    events = 0
    if policy is not None:
        events = int(core.scheduler.kv_policy_counters.read()["events"])
    core.shutdown()
    return [list(output.outputs[0].token_ids) for output in outputs], events


def main(model: str, trace_dir: str, output: str, extent: str = "") -> None:
    """Run a policy of each tier; write what came out.

    With `all`, stock, movers, what never cuts and a prefix cache, too.
    """
    if ON_V2:
        install("vllm_kvpolicy.worker.backends.triton.KVPolicyTritonBackend")
    from vllm_kvpolicy import compat

    has_float8 = compat.reads_float8()  # v1's attention on this CPU
    result: dict[str, Any] = {}
    if extent == "all":
        result["stock"], _ = generate(model, None)
    counts, signals = count_builds(), note_signals()
    cases = {
        "hard-snapkv": {
            **KV_POLICY,
            "policy": "hard-snapkv",
            "policy_config": {"window": 8, "hard_mode": "dynamic"},
            "trace_dir": trace_dir,
        },
        "ams-tova": {
            **KV_POLICY,
            "policy": "ams-tova",
            "allow": ["epikv"],  # whose signals are measured for every request
            "policy_config": {"window": 8},
            "trace_dir": trace_dir,
        },
    }
    if extent == "all":
        ragged = {"policy": "identity", "policy_config": {"ragged": True}}
        cases = {
            "identity": {**KV_POLICY, "policy": "identity"},
            "ragged identity": KV_POLICY | ragged,
            "infinite": {**KV_POLICY, "policy": "streaming", "budget": 128},
            "on call": {**KV_POLICY, "policy": "streaming", "events": "pressure"},
            **cases,
        }
    if has_float8:
        changes = {"trace_dir": f"{trace_dir}-fp8", "allow": []}  # nothing measured
        cases["fp8"] = cases["ams-tova"] | changes
        if extent == "all":
            result["fp8 stock"], _ = generate(model, None, **FP8)
            movers = {f"fp8 {name}": cases[name] for name in MOVERS}
            cases |= movers
    for name, policy in cases.items():
        before = dict(counts)
        # As where attention is replayed: always our tables, queries always saved.
        compat.captures_attention = lambda config, name=name: name in CAPTURED
        changes = FP8 if name.startswith("fp8") else {}
        tokens, events = generate(model, policy, **changes)
        ran = {key: counts[key] - before[key] for key in counts}
        result[name] = {"tokens": tokens, "events": events, **ran}
    result["signals"] = dict(signals)
    for name in ("ams-tova", "hard-snapkv") if extent == "all" else ():
        policy = {key: value for key, value in cases[name].items() if key in SHARED}
        compat.captures_attention = lambda config: True
        cold, _ = generate(model, policy, common=50)
        hits = count_hits()
        warm, events = generate(model, policy, common=50, enable_prefix_caching=True)
        found = {"cold": cold, "tokens": warm, "events": events, "hits": hits}
        result[f"{name} shared"] = found
    Path(output).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[2:])
