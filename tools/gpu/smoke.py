#!/usr/bin/env python3
"""Smoke test: vLLM on a tiny random Llama or Qwen3, nothing fetched, one JSON line.

Writes a config, a byte-level tokenizer and random weights, generates in bfloat16 and
prints tokens per second. --check compares log-probabilities of a prompt with plain
transformers on the same weights. Status 1 if anything is wrong.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# Set before vllm is imported; the caller's own values win.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # flashinfer is not carried
    "VLLM_USE_DEEP_GEMM": "0",  # its extension needs torch >= 2.13
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
}
SPECIAL_TOKENS = ("<pad>", "<s>", "</s>")
CHECK_PROMPT = "check " + "abcdefghij klmnop " * 12
CHECK_TOLERANCE = 0.05  # mean difference of log-probabilities, bfloat16


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", choices=("llama", "qwen3"), default="llama")
    for name, number in {
        "layers": 4,
        "hidden": 512,
        "heads": 8,
        "kv-heads": 2,
        "head-dim": 64,
        "vocab": 512,
        "max-len": 2048,
        "batch": 32,
        "out": 128,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=number)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--backend", help="TRITON_ATTN or FLASH_ATTN; vLLM's choice")
    parser.add_argument(
        "--eager", action="store_true", help="no compilation, no graphs"
    )
    parser.add_argument("--mode", type=int, help="of compilation, 0 to 3")
    parser.add_argument("--compilation", default="{}", help="its config, as JSON")
    parser.add_argument("--dummy", action="store_true", help="no weights on disk")
    parser.add_argument(
        "--check", action="store_true", help="compare log-probabilities"
    )
    parser.add_argument("--no-jit-warmup", action="store_true")
    parser.add_argument(
        "--rehearse", action="store_true", help="write the model, start no engine"
    )
    parser.add_argument("--kv-gib", type=float, default=1.0, help="KV cache")
    return parser.parse_args()


def write_model(args: argparse.Namespace, folder: Path) -> None:
    """Write config, tokenizer, and weights unless they are dummies."""
    import torch
    import transformers

    size = write_tokenizer(args.vocab, folder)
    prefix = {"llama": "Llama", "qwen3": "Qwen3"}[args.arch]
    config = getattr(transformers, f"{prefix}Config")(
        vocab_size=size,
        hidden_size=args.hidden,
        intermediate_size=3 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        head_dim=args.head_dim,
        max_position_embeddings=max(args.max_len, 2048),
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    kind = getattr(transformers, f"{prefix}ForCausalLM")
    config.architectures = [kind.__name__]
    if args.dummy:
        config.dtype = "bfloat16"
        config.save_pretrained(folder)
        return
    torch.manual_seed(0)
    kind(config).to(torch.bfloat16).save_pretrained(folder)


def write_tokenizer(vocab: int, folder: Path) -> int:
    """Write a tokenizer of one token per byte; return the size of its vocabulary."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words += [f"<u{number}>" for number in range(len(words), vocab)]
    ids = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
    )
    fast.save_pretrained(folder)
    return len(words)


def engine_arguments(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the arguments of vLLM's LLM."""
    from vllm.platforms import current_platform

    compilation = json.loads(args.compilation)
    if args.mode is not None:
        compilation["mode"] = args.mode
    arguments: dict[str, Any] = {
        "model": str(folder),
        "dtype": args.dtype,
        "max_model_len": args.max_len,
        "max_num_seqs": max(args.batch, 1),
        "enforce_eager": args.eager,
        "kv_cache_memory_bytes": int(args.kv_gib * 2**30),
        "seed": 0,
    }
    if current_platform.is_cuda():
        arguments["gpu_memory_utilization"] = 0.3
    if args.backend:
        arguments["attention_backend"] = args.backend
    if compilation:
        arguments["compilation_config"] = compilation
    if args.no_jit_warmup:
        arguments["kernel_config"] = {"enable_jit_warmup": False}
    if args.dummy:
        arguments["load_format"] = "dummy"
    return arguments


def generate(llm: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Generate greedily, twice, and with the random sampler; return what came out."""
    from vllm import SamplingParams

    words = "the quick brown fox "
    prompts = [f"Request {n}: " + words * (1 + n % 7) for n in range(args.batch)]
    greedy = SamplingParams(temperature=0, max_tokens=args.out, ignore_eos=True)
    short = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    drawn = SamplingParams(
        temperature=0.8, top_k=20, top_p=0.9, max_tokens=8, ignore_eos=True, seed=1
    )
    llm.generate(prompts[:1], short, use_tqdm=False)
    started = time.time()
    outputs = llm.generate(prompts, greedy, use_tqdm=False)
    seconds = time.time() - started
    again = llm.generate(prompts, greedy, use_tqdm=False)
    sampled = llm.generate(prompts[:2], drawn, use_tqdm=False)
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    count = sum(map(len, tokens))
    same = sum(
        list(output.outputs[0].token_ids) == first
        for output, first in zip(again, tokens, strict=True)
    )
    lengths = {len(output.outputs[0].token_ids) for output in sampled}
    return {
        "out_tokens": count,
        "tokens_per_s": round(count / seconds, 1),
        "same_again": f"{same}/{len(tokens)}",
        "ok": count == args.batch * args.out and lengths == {8},
    }


def compare(llm: Any, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Compare a prompt's log-probabilities with those of transformers."""
    import torch
    from transformers import AutoModelForCausalLM
    from vllm import SamplingParams

    asked = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    (output,) = llm.generate([CHECK_PROMPT], asked, use_tqdm=False)
    ids = list(output.prompt_token_ids)
    given = output.prompt_logprobs
    ours = [given[place][ids[place]].logprob for place in range(1, len(ids))]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = getattr(torch, args.dtype)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
    with torch.inference_mode():
        logits = model(torch.tensor([ids], device=device)).logits.float()[0]
    logprobs = logits.log_softmax(-1)[:-1]
    follow = torch.tensor(ids[1:], device=device)
    theirs = logprobs.gather(1, follow[:, None])[:, 0].tolist()
    distances = [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
    mean = sum(distances) / len(distances)
    return {
        "check_tokens": len(ids),
        "check_max": round(max(distances), 4),
        "check_mean": round(mean, 5),
        "check_ok": mean < CHECK_TOLERANCE,
    }


def main() -> int:
    """Run the command; return its exit status."""
    args = parse_args()
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_model(args, folder)
        if args.rehearse:
            print(f"smoke rehearsed: {sorted(path.name for path in folder.iterdir())}")
            return 0
        started = time.time()
        import torch
        import vllm

        imported = time.time()
        llm = vllm.LLM(**engine_arguments(args, folder))
        found: dict[str, Any] = {
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "backend": args.backend,
            "eager": args.eager,
            "import_s": round(imported - started, 1),
            "start_s": round(time.time() - imported, 1),
            **generate(llm, args),
        }
        if args.check and not args.dummy:
            found |= compare(llm, args, folder)
    is_good = found["ok"] and found.get("check_ok", True)
    print(f"smoke {'ok' if is_good else 'FAILED'} {json.dumps(found)}", flush=True)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
