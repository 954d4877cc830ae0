"""DMS: a model trained for it decides itself which tokens leave its cache.

A token is dropped once it is more than `window` tokens old if the logit of its
successor is above 0: scale * x - offset, x a channel of the model's queries or the
output of an adapter.

Source: Dynamic Memory Sparsification, arXiv 2506.05345, section 3 and appendix B, and
https://github.com/NVIDIA/Model-Optimizer/tree/a2fbac7/experimental/dms; see `model` and
docs/dms.md. Deviations: in the paper a token decides about itself, here as in NVIDIA's
release its successor does, unless the model or `dms_shift` says otherwise; tokens leave
the window at events; heads are filled up to whole pages with refused tokens; sinks are
kept.
"""

import math
from typing import Any, Self

import torch
from pydantic import Field
from torch import Tensor, nn
from vllm.tokenizers import cached_tokenizer_from_config

from vllm_kvpolicy.kernels.dms_decision import DecisionWeights, decision_logits
from vllm_kvpolicy.kernels.visibility import Decisions
from vllm_kvpolicy.policies import model_files
from vllm_kvpolicy.policies.admissions.dms.model import (
    DmsAdapter,
    DmsRule,
    load,
    model_folder,
    rule_for,
    supported,
)
from vllm_kvpolicy.policies.base import LoadedModel, Needs
from vllm_kvpolicy.policies.hooks import (
    Buffers,
    HeadLogits,
    attention_modules,
    decoder_layers,
)
from vllm_kvpolicy.policies.options import MOST_TOKENS, ExactOptions, FilePath
from vllm_kvpolicy.policies.ranks import HeadShard
from vllm_kvpolicy.policies.words import SIZED_BY_HELD, BaseAdmission


class DelayedEviction(BaseAdmission):
    """Reads the decisions of a model that was trained with DMS, or of an adapter."""

    summary = (
        "the model is trained to mark which tokens are dropped after the recent window"
    )
    source = "DMS, arXiv 2506.05345"
    decides = True
    decides_later = True
    fitted = True
    refuses = SIZED_BY_HELD

    class Options(ExactOptions):
        dms_adapter: FilePath | None = Field(
            None,
            description="adapter for a model without DMS decisions of its own: from "
            "`python -m training dms` in a checkout (.safetensors), or a checkpoint "
            "folder with dms_proj_alpha tensors",
        )
        dms_window: int | None = Field(
            None,
            ge=1,
            le=MOST_TOKENS,
            description="number of preceding tokens that a query always sees; by "
            "default that of the model or the adapter",
        )
        dms_channel: int | None = Field(
            None,
            ge=-1024,
            le=1023,
            description="query channel that holds the decision, negative values count "
            "from the end; by default the last",
        )
        dms_shift: int | None = Field(
            None,
            ge=0,
            le=1,
            description="a token decides about the token this many positions before "
            "it; by default 1, and 0 for models with dms_metadata.json",
        )
        dms_zero_after_rope: bool | None = Field(
            None,
            description="also set the decision channel to zero after RoPE; by default "
            "true, and false for models with dms_metadata.json",
        )

    @classmethod
    def build(cls, options: Any) -> Self:
        path = options.dms_adapter
        return cls(None if path is None else load(path), options)

    @classmethod
    def check_start(cls, options: Any, kept: Any, vllm_config: Any) -> None:
        model_config = vllm_config.model_config
        supported(model_config.hf_text_config.model_type)
        adapter = _adapter(options.dms_adapter, vllm_config)
        rule = rule_for(model_config, adapter, options)
        size = model_config.get_head_size()
        if not -size <= rule.channel < size:
            raise ValueError(
                f"dms_channel: got {rule.channel}, expected one of {size} channels"
            )
        if math.isinf(rule.offset) and not rule.is_borrowed:
            raise ValueError(
                "dms: dms_disable_eviction is set in config.json, so nothing is "
                "dropped; leave out --kv-policy"
            )
        _check_ranks(rule, vllm_config)
        if kept.recent_tokens != rule.window:
            raise ValueError(
                "dms: the model or adapter was trained with a window of "
                f"{rule.window} tokens, got --kv-recent {kept.recent_tokens}; set "
                f"--kv-recent {rule.window}"
            )
        if adapter is None:
            _check_tokenizer(model_config)

    def __init__(self, adapter: DmsAdapter | None, options: Any) -> None:
        self.adapter, self.options = adapter, options
        self.needs = Needs(until=True, exact=options.exact)
        self._follow(DmsRule())
        self.weights: DecisionWeights | None = None
        self._logits: list[Tensor] = []
        self._shard: HeadShard | None = None

    def take_heads(self, shard: HeadShard) -> None:
        self._shard = shard

    def _follow(self, rule: DmsRule) -> None:
        self.rule, self.window, self.shift = rule, rule.window + 1, rule.shift

    @property
    def nbytes(self) -> int:
        weights = self.weights
        adapter = (weights.norm, weights.projection) if weights is not None else ()
        return sum(tensor.nbytes for tensor in (*self._logits, *adapter))

    def attach(self, model: LoadedModel) -> None:
        config, first = model.vllm_config.model_config, model.layers[0]
        self._follow(rule_for(config, self.adapter, self.options))
        shape, device = (model.step_tokens, first.num_kv_heads), model.device
        # Copies, not views: compiled graphs must not be given parts of one buffer.
        self._logits = [torch.zeros(shape, device=device) for _ in model.layers]
        if self.rule.is_borrowed:
            parents = attention_modules(model.module, model.layers)
            given = first.num_heads, model.dtype
            for parent, logits in zip(parents, self._logits, strict=True):
                attach_borrowed(parent, self.rule, logits, *given)
            return
        adapter = load(model_folder(config)) if self.adapter is None else self.adapter
        weights = adapter.stacked()
        if self._shard is not None:
            weights["projection"] = self._shard.kv_heads(weights["projection"], 1)
        self.weights = DecisionWeights(
            **{k: t.to(device, model.dtype) for k, t in weights.items()}
        )
        epsilon = config.hf_text_config.rms_norm_eps
        found = decoder_layers(model.module, len(model.layers))
        for index, layer in enumerate(found):
            own = self.weights.layer(index)
            attach_adapter(layer, self._logits[index], own, epsilon)

    def decisions(self, layer: int, key: Tensor, positions: Tensor) -> Decisions:
        """Return [T, H] decisions on the tokens before; see `BaseAdmission`."""
        logits = self._logits[layer][: len(positions)]
        if self.rule.per_layer:
            logits = logits[:, :1].expand_as(logits)
        return Decisions(logits, self.rule.scale, self.rule.offset)


def attach_borrowed(
    attention: nn.Module,
    rule: DmsRule,
    logits: Tensor,
    num_heads: int,
    dtype: torch.dtype,
) -> None:
    """Read a channel of the first query head of each group, and zero it.

    Args:
        attention: vLLM's attention module of a decoder layer: projections and, as
            `attn`, the attention layer.
        rule: which channel.
        logits: [step_tokens, H] float32, what is taken; scale and offset are not
            applied.
        num_heads: Hq, query heads.
        dtype: of the model.

    Raises:
        ValueError: not a module that is known.
    """
    if not hasattr(attention, "qkv_proj") or not hasattr(attention, "attn"):
        raise ValueError(
            f"{type(attention).__name__}: expected qkv_proj and attn, as in vLLM's "
            "Llama and Qwen3"
        )
    size, device = attention.head_dim, logits.device
    channel = rule.channel % size
    group = num_heads // logits.shape[1]
    # Without norms of its own, a query is what the projection gives.
    source = getattr(attention, "q_norm", None)
    is_normed = source is not None
    source = attention.qkv_proj if source is None else source
    visible = torch.ones(num_heads, size, device=device, dtype=dtype)
    visible[::group, channel] = 0  # sync-ok: a slice
    rest = torch.ones(2 * logits.shape[1] * size, device=device, dtype=dtype)
    before = visible if is_normed else torch.cat([visible.flatten(), rest])
    first = torch.arange(0, num_heads, group, device=device)
    taken = HeadLogits(logits=logits, visible=before, channels=first * size + channel)
    source.add_module("kv_policy_logits", taken)
    source.register_forward_hook(_borrow)
    if rule.zero_after_rope:
        hidden = Buffers(visible=visible.flatten().clone())
        attention.attn.add_module("kv_policy_hidden", hidden)
        attention.attn.register_forward_pre_hook(_hide)


def _borrow(module: nn.Module, _args: Any, output: Any) -> Any:
    """Copy the borrowed channels of [T, Hq, D] or of [T, (Hq + 2H) * D]."""
    values = output[0] if isinstance(output, tuple) else output
    taken = module.kv_policy_logits
    taken(values.flatten(1)[:, taken.channels])
    hidden = values * taken.visible
    return (hidden, *output[1:]) if isinstance(output, tuple) else hidden


def _hide(layer: nn.Module, args: tuple) -> tuple:
    """Set borrowed channels of rotated queries [T, Hq * D] to 0; a pre-hook."""
    query, *others = args
    visible = layer.kv_policy_hidden.visible
    return ((query.flatten(1) * visible).view(query.shape), *others)


def attach_adapter(
    layer: nn.Module, logits: Tensor, weights: DecisionWeights, epsilon: float
) -> None:
    """Compute logits from the residual stream before a decoder layer.

    Args:
        layer: vLLM's decoder layer, called with positions, hidden states and residual.
        logits: [step_tokens, H] float32, written; scale and offset are not applied.
        weights: of this layer, in the model's dtype.
    """
    taken = HeadLogits(logits=logits, norm=weights.norm, projection=weights.projection)
    taken.epsilon = epsilon
    layer.add_module("kv_policy_logits", taken)
    layer.register_forward_pre_hook(_adapt, with_kwargs=True)


def _adapt(layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    """Store an adapter's logits for [T, d]; a pre-hook."""
    given = dict(zip(("positions", "hidden_states", "residual"), args, strict=False))
    given |= kwargs
    hidden, residual = given["hidden_states"], given["residual"]
    stream = hidden if residual is None else hidden + residual
    taken = layer.kv_policy_logits
    weights = DecisionWeights(taken.norm, taken.projection)
    taken(decision_logits(stream, weights, taken.epsilon, 1.0, 0.0))


def _check_ranks(rule: DmsRule, vllm_config: Any) -> None:
    """Raise ValueError where a rank would have to decide by a head that it lacks."""
    ranks = vllm_config.parallel_config.tensor_parallel_size
    heads = vllm_config.model_config.get_total_num_kv_heads()
    if ranks > 1 and rule.per_layer:
        raise ValueError(
            "dms: the first KV head decides for all of its layer (dms_alpha_per), and "
            "one rank has it; set --tensor-parallel-size 1"
        )
    if ranks > heads and rule.is_borrowed:
        raise ValueError(
            "dms: the first query head of a group decides, and ranks that share a KV "
            f"head do not all have it; set --tensor-parallel-size {heads} or less"
        )


def _check_tokenizer(model_config: Any) -> None:
    """Raise ValueError where texts have no tokens.

    Released checkpoints may lack a tokenizer. For some types of models transformers
    then makes an empty one, and every prompt would be empty.
    """
    found = "has no tokenizer"
    try:
        tokenizer = cached_tokenizer_from_config(model_config)
        if tokenizer is None:  # not wanted: prompts are token ids
            return
        if tokenizer.encode("Hello world", add_special_tokens=False):
            return
    except (OSError, ValueError) as error:
        said = " ".join(str(error).split())
        found = f"has no tokenizer that can be read ({said})"
    raise ValueError(
        f"dms: {model_config.tokenizer} {found}; set --tokenizer to the model that "
        "this one was made from, for nvidia/Qwen3-8B-DMS-8x --tokenizer Qwen/Qwen3-8B"
    )


def _adapter(path: str | None, vllm_config: Any) -> DmsAdapter | None:
    """Load an adapter and check that it fits the model; None for none."""
    if path is None:
        return None
    adapter, shape = load(path), model_files.ModelShape.of(vllm_config)
    model = vllm_config.model_config
    adapter.fits(
        flavour=model.hf_text_config.model_type,
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        hidden_size=model.get_hidden_size(),
    )
    return adapter
