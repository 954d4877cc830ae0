"""`python -m training qfilter` or `triattention`: makes a scorer's calibration file.

Stock vLLM reads a text as prompts, in this process and without compiled graphs, so that
hooks on the model's modules see the queries.

Source: TriAttention (arXiv 2604.04921) and Q-Filters (arXiv 2503.02812) section 3;
https://github.com/WeianMao/triattention/blob/c3744ee6a50522a1559a577f85aef2b165a344f2/scripts/calibrate.py,
https://github.com/NathanGodey/qfilters/blob/cda5c38d3aa3f11815cf991661be80cb4f345815/make_filters.py.
Deviations: queries before RoPE are taken after the query norm of models that have one
(TriAttention's script omits the norm, its scores do not); a filter is computed from all
queries (theirs: 3000 random ones) and its sign from their mean projection, as in the
paper (the script counts signs).
"""

import argparse
import json
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from tqdm import tqdm
from vllm import EngineArgs, SamplingParams, TokensPrompt
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.tokenizers import get_tokenizer
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from training import option
from vllm_kvpolicy.commands.outputs import new_file
from vllm_kvpolicy.policies.calibration import Calibration

PASSAGE_TOKENS = 4096  # the text is cut into passages of at most this many tokens
NUM_BLOCKS = PASSAGE_TOKENS // 16 + 2  # enough for a passage at any block size


class QueryStatistics(Protocol):
    """Sums queries up and returns the tensors of a calibration file."""

    def add(self, layer: int, before: torch.Tensor, after: torch.Tensor) -> None:
        """Add queries [N, Hq, D] of N tokens, before and after RoPE."""
        ...

    def result(self, num_tokens: int, num_kv_heads: int) -> dict[str, torch.Tensor]:
        """Return the tensors of the calibration file; see `Calibration.shapes`."""
        ...


class TriAttentionStatistics:
    """Mean and mean length of the queries before RoPE, per channel pair."""

    def __init__(self) -> None:
        self.queries: dict[int, torch.Tensor] = {}
        self.lengths: dict[int, torch.Tensor] = {}

    def add(self, layer: int, before: torch.Tensor, after: torch.Tensor) -> None:
        """See `QueryStatistics`."""
        query = before.double()
        length = torch.hypot(*query.chunk(2, dim=-1))
        self.queries[layer] = self.queries.get(layer, 0) + query.sum(0)
        self.lengths[layer] = self.lengths.get(layer, 0) + length.sum(0)

    def result(self, num_tokens: int, num_kv_heads: int) -> dict[str, torch.Tensor]:
        """See `QueryStatistics`."""
        real, imag = (_stacked(self.queries) / num_tokens).float().chunk(2, dim=-1)
        return {
            "query_real": real.contiguous(),
            "query_imag": imag.contiguous(),
            "query_abs": (_stacked(self.lengths) / num_tokens).float(),
        }


class QFilterStatistics:
    """Direction away from the queries after RoPE, mean over the heads of a group.

    For each query head this is the first right singular vector of all queries, with the
    sign that makes their mean projection negative.
    """

    def __init__(self) -> None:
        self.queries: dict[int, torch.Tensor] = {}
        self.products: dict[int, torch.Tensor] = {}

    def add(self, layer: int, before: torch.Tensor, after: torch.Tensor) -> None:
        """See `QueryStatistics`."""
        query = after.double().transpose(0, 1)  # [Hq, N, D]
        self.queries[layer] = self.queries.get(layer, 0) + query.sum(1)
        self.products[layer] = self.products.get(layer, 0) + query.mT @ query

    def result(self, num_tokens: int, num_kv_heads: int) -> dict[str, torch.Tensor]:
        """See `QueryStatistics`."""
        # Q's right singular vectors are the eigenvectors of Q^T Q, in reverse order.
        vectors = torch.linalg.eigh(_stacked(self.products)).eigenvectors[..., -1]
        projection = (vectors * _stacked(self.queries)).sum(-1, keepdim=True)
        away = torch.where(projection > 0, -vectors, vectors)
        filters = away.unflatten(1, (num_kv_heads, -1)).mean(2)
        return {"filters": filters.float()}


STATISTICS: dict[str, type[QueryStatistics]] = {
    "triattention": TriAttentionStatistics,
    "qfilter": QFilterStatistics,
}


def _stacked(layers: dict[int, torch.Tensor]) -> torch.Tensor:
    """Stack the layers in order, on the host."""
    return torch.stack([layers[layer].cpu() for layer in sorted(layers)])


class QueryReader:
    """Records the queries of a model's layers, before and after RoPE, by hooks.

    Layers may share one rotary embedding. The query that it receives belongs to the
    attention layer that is called next.

    Args:
        model: a model of vLLM that runs eagerly, all of it in this process.

    Attributes:
        layers: the attention layers in model order.
        rope: one rotary embedding of the model.
        num_tokens: tokens that have passed the last layer.

    Raises:
        ValueError: RoPE does not rotate whole heads in the half layout.
    """

    def __init__(self, model: torch.nn.Module, statistics: QueryStatistics) -> None:
        modules = list(model.modules())
        self.layers = [item for item in modules if isinstance(item, Attention)]
        ropes = [item for item in modules if isinstance(item, RotaryEmbedding)]
        if not ropes or not all(
            rope.is_neox_style and rope.rotary_dim == rope.head_size for rope in ropes
        ):
            raise ValueError(
                "model: expected rotary embeddings that rotate whole heads, channel i "
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
        """Remove the hooks, because vLLM shares rotary embeddings between models."""
        for handle in self._handles:
            handle.remove()

    def _on_rope(self, rope: Any, args: tuple[Any, ...]) -> None:
        self._before = args[1].clone()  # RoPE rotates it in place

    def _on_attention(self, index: int, layer: Any, args: tuple[Any, ...]) -> None:
        before, self._before = self._before, None
        if before is None:
            raise ValueError(f"model: attention layer {index} has no rotary embedding")
        heads = (-1, layer.num_heads, layer.head_size)
        self._statistics.add(index, before.view(heads), args[0].view(heads))
        if index == len(self.layers) - 1:
            self.num_tokens += len(before)


def start_engine(model: str, **engine_args: Any) -> LLMEngine:
    """Start stock vLLM in this process.

    Args:
        model: folder or name, as for vLLM.
        engine_args: further arguments of vLLM's engine, such as `dtype`.
    """
    config = EngineArgs(
        model=model, enforce_eager=True, enable_prefix_caching=False, **engine_args
    ).create_engine_config()
    # The engine's class methods may start the model in another process.
    return LLMEngine(config, UniProcExecutor, log_stats=False)


def read_tokens(model: str, text: Path, num_tokens: int) -> list[int]:
    """Return the first tokens of a text file.

    Raises:
        ValueError: the file cannot be read or is too short, or `num_tokens` is below 1.
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
    """Run a model on tokens and return the statistics of its queries.

    Args:
        kind: "triattention" or "qfilter".

    Raises:
        ValueError: a model whose queries the hooks cannot see.
    """
    engine = start_engine(
        model,
        max_num_seqs=1,
        max_model_len=-1,  # the smaller of the model's and what these blocks hold
        num_gpu_blocks_override=NUM_BLOCKS,
        **engine_args,
    )
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
        raise RuntimeError(
            f"read the queries of {reader.num_tokens} tokens, expected {len(tokens)}"
        )
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


def main(kind: str, arguments: Sequence[str]) -> None:
    """Write the file of one scorer and print how to serve with it."""
    parser = argparse.ArgumentParser(
        prog=f"python -m training {kind}",
        description=f"Make the file that {kind} reads. The text should resemble what "
        "the model will serve.",
    )
    add = parser.add_argument
    add("--model", required=True, help="folder or name, as for vLLM")
    add("--text", required=True, type=Path, help="UTF-8 text file")
    option(parser, "--tokens", int, 32768, "number of tokens to read")
    add("--output", required=True, type=new_file, help="file to write")
    add(
        "--gpu-memory-utilization",
        type=float,
        default=argparse.SUPPRESS,
        help="fraction of GPU memory that vLLM may use; lower it if another server "
        "shares the GPU",
    )
    given = vars(parser.parse_args(arguments))
    model, text, output = (given.pop(name) for name in ("model", "text", "output"))
    try:
        tokens = read_tokens(model, text, given.pop("tokens"))
    except ValueError as error:
        parser.error(str(error))
    calibrate(kind, model, tokens, **given).save(output)
    key = json.dumps({f"{kind}_calibration": str(output)})
    print(f"wrote {output}; serve with --kv-policy-config '{key}'")


qfilter = partial(main, "qfilter")
triattention = partial(main, "triattention")
