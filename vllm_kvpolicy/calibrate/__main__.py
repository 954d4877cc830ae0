"""`python -m vllm_kvpolicy.calibrate`: makes a calibration file from model and text.

Runs the text through the prefill of stock vLLM, within this process and without
compiled graphs, so that the model's modules can be listened to.
"""

import argparse
import json
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from vllm import EngineArgs, SamplingParams, TokensPrompt
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.tokenizers import get_tokenizer
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from vllm_kvpolicy.calibrate.query_statistics import STATISTICS, QueryStatistics
from vllm_kvpolicy.policies.calibration import Calibration, save

PASSAGE_TOKENS = 4096  # the text is cut into passages of at most this length
NUM_BLOCKS = PASSAGE_TOKENS // 16 + 2  # hold a passage, whatever the block size


class QueryReader:
    """Listens to the queries of a model's layers, before and after RoPE.

    Layers may share one rotary embedding: what it gets is the query of the attention
    layer that is called next.

    Args:
        model: a model of vLLM that runs eagerly, all of it in this process.
        statistics: where the queries go.

    Attributes:
        layers: the attention layers in model order.
        rope: a rotary embedding of the model.
        num_tokens: tokens that went through the last layer.

    Raises:
        ValueError: RoPE does not turn whole heads in the half layout.
    """

    def __init__(self, model: torch.nn.Module, statistics: QueryStatistics) -> None:
        modules = list(model.modules())
        self.layers = [item for item in modules if isinstance(item, Attention)]
        ropes = [item for item in modules if isinstance(item, RotaryEmbedding)]
        if not ropes or not all(
            rope.is_neox_style and rope.rotary_dim == rope.head_size for rope in ropes
        ):
            raise ValueError(
                "model: expected rotary embeddings that turn whole heads, channel i "
                f"with i + D/2, got {ropes}"
            )
        self.rope = ropes[0]
        self.num_tokens = 0
        self._statistics = statistics
        self._before: torch.Tensor | None = None
        hooks = [(rope, self._on_rope) for rope in ropes]
        hooks += [
            (layer, partial(self._on_attention, index))
            for index, layer in enumerate(self.layers)
        ]
        self._handles = [
            module.register_forward_pre_hook(hook) for module, hook in hooks
        ]

    def close(self) -> None:
        """Stop listening; vLLM shares rotary embeddings between models, too."""
        for handle in self._handles:
            handle.remove()

    def _on_rope(self, rope: Any, args: tuple[Any, ...]) -> None:
        self._before = args[1].clone()  # turned in place

    def _on_attention(self, index: int, layer: Any, args: tuple[Any, ...]) -> None:
        before, self._before = self._before, None
        if before is None:
            raise ValueError(f"model: attention layer {index} has no rotary embedding")
        heads = (-1, layer.num_heads, layer.head_size)
        self._statistics.add(index, before.view(heads), args[0].view(heads))
        if index == len(self.layers) - 1:
            self.num_tokens += len(before)


def read_tokens(model: str, text: Path, num_tokens: int) -> list[int]:
    """Return the first tokens of a text file.

    Raises:
        ValueError: the file cannot be read or is too short, or no tokens are wanted.
    """
    if num_tokens < 1:
        raise ValueError(f"tokens: got {num_tokens}, expected an integer >= 1")
    try:
        content = text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"text: cannot read {str(text)!r}: {error}") from None
    tokens = get_tokenizer(model).encode(content)[:num_tokens]
    if len(tokens) < num_tokens:
        raise ValueError(
            f"text: {str(text)!r} has {len(tokens)} tokens, expected {num_tokens} or "
            "more; give more text or a smaller --tokens"
        )
    return tokens


def calibrate(
    kind: str, model: str, tokens: Sequence[int], **engine_args: Any
) -> Calibration:
    """Run tokens through a model and return the statistics of its queries.

    Args:
        kind: "triattention" or "qfilter".
        model: folder or name, as for vLLM.
        tokens: token ids of a text.
        engine_args: further arguments of vLLM's engine, such as `dtype`.

    Raises:
        ValueError: a model that this cannot listen to.
    """
    config = EngineArgs(
        model=model,
        enforce_eager=True,
        enable_prefix_caching=False,
        max_num_seqs=1,
        max_model_len=-1,  # the model's own, or what these blocks hold
        num_gpu_blocks_override=NUM_BLOCKS,
        **engine_args,
    ).create_engine_config()
    # Not by the class methods, which may put the model into another process.
    engine = LLMEngine(config, UniProcExecutor, log_stats=False)
    try:
        return _read_queries(kind, model, tokens, engine)
    finally:
        engine.engine_core.shutdown()


def _read_queries(
    kind: str, model: str, tokens: Sequence[int], engine: LLMEngine
) -> Calibration:
    statistics = STATISTICS[kind]()
    (reader,) = engine.apply_model(lambda module: QueryReader(module, statistics))
    with closing(reader), tqdm(total=len(tokens), unit=" tokens", desc=kind) as shown:
        size = min(PASSAGE_TOKENS, engine.model_config.max_model_len - 1)
        for start in range(0, len(tokens), size):
            passage = TokensPrompt(prompt_token_ids=list(tokens[start : start + size]))
            params = SamplingParams(max_tokens=1, detokenize=False)
            engine.add_request(str(start), passage, params)
            while engine.has_unfinished_requests():
                engine.step()
            shown.update(reader.num_tokens - shown.n)
    if reader.num_tokens != len(tokens):
        raise RuntimeError(f"read {reader.num_tokens} queries of {len(tokens)} tokens")
    first = reader.layers[0]
    return Calibration(
        kind=kind,
        model=model,
        num_layers=len(reader.layers),
        num_heads=first.num_heads,
        num_kv_heads=first.num_kv_heads,
        head_dim=first.head_size,
        rope_theta=float(reader.rope.base),
        num_tokens=len(tokens),
        tensors=statistics.result(len(tokens), first.num_kv_heads),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; `arguments` are those of the process unless given."""
    parser = argparse.ArgumentParser(
        prog="python -m vllm_kvpolicy.calibrate",
        description="Make the calibration file that a policy reads, from a text like "
        "those that the model will be served with.",
    )
    parser.add_argument("kind", choices=list(STATISTICS), help="scorer that reads it")
    parser.add_argument("--model", required=True, help="folder or name, as for vLLM")
    parser.add_argument("--text", required=True, type=Path, help="UTF-8 text file")
    parser.add_argument(
        "--tokens", type=int, default=32768, help="tokens to read (default: 32768)"
    )
    parser.add_argument("--output", required=True, type=Path, help="file to write")
    parser.add_argument(
        "--gpu-memory-utilization",
        type=float,
        default=argparse.SUPPRESS,
        help="share of the memory that vLLM may take; less beside another server",
    )
    given = parser.parse_args(arguments)
    memory = {
        key: value
        for key, value in vars(given).items()
        if key == "gpu_memory_utilization"
    }
    try:
        tokens = read_tokens(given.model, given.text, given.tokens)
    except ValueError as error:
        parser.error(str(error))
    if not given.output.parent.is_dir():
        parser.error(f"output: {str(given.output.parent)!r} is no folder")
    save(given.output, calibrate(given.kind, given.model, tokens, **memory))
    key = json.dumps({f"{given.kind}_calibration": str(given.output)})
    print(f"wrote {given.output}; serve with --kv-policy-config '{key}'")


if __name__ == "__main__":
    main()
