"""Reads from a loaded model how its attention layers rotate, and their learned sinks.

vLLM's own models have a table of cosines and sines beside each attention layer. Models
of its Transformers backend have frequencies in one module above all layers, and a
function next to its class that tells which channels are pairs.

A learned sink is a logit of each query head that takes part in every softmax and whose
share no token gets (gpt-oss, arXiv 2508.10925, section 2.2). Elsewhere `sinks` alone
are the first tokens of a request.
"""

import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from vllm_kvpolicy import compat
from vllm_kvpolicy.kernels.rope import Rope

# -- learned sinks -------------------------------------------------------------


def sink_logits(layers: Sequence[Any]) -> torch.Tensor | None:
    """Return the logits of the learned sinks, [L, Hq] float32; None for none.

    As they are now: weights may be replaced while a server runs. All layers have sinks
    or none has.
    """
    if not (layers and has_sinks(layers[0])):
        return None
    return torch.stack([layer.impl.sinks.detach() for layer in layers]).float()


def has_sinks(layer: Any) -> bool:
    """Return whether an attention layer has learned sinks."""
    return getattr(layer.impl, "sinks", None) is not None


def check_known(layers: Sequence[Any], vllm_config: Any) -> None:
    """Raise ValueError for learned sinks that no refusal at start-up knows of.

    Those are of other types of models, or of some layers alone.
    """
    found = [*map(has_sinks, layers)]
    if any(found) and not (all(found) and compat.has_learned_sinks(vllm_config)):
        raise ValueError(
            f"{vllm_config.model_config.model}: its attention layers have learned "
            "sinks, which are tested in models of type "
            f"{', '.join(compat.LEARNED_SINKS)} alone; leave out --kv-policy"
        )


# -- rotations -----------------------------------------------------------------

EMBEDDING = "rotary_emb"  # None in layers that do not rotate
# Attributes of the modules around an attention layer in models of which some layers do
# not rotate. A layer of full attention rotates unless one of these is false.
SWITCHES = (
    "use_rope",
    "_use_rope",
    "use_rotary",
    "v1",
    "force_rope",
    "apply_rope_all_layers",
    "is_local_attention",
)


def model_rope(model: nn.Module, layers: Sequence[Any]) -> Rope:
    """Return how layers of full attention rotate.

    A layer does not where one of SWITCHES is false, or where its embedding is None.

    Raises:
        ValueError: a rotary embedding of a kind that is not known, or none at all.
    """
    modules = dict(model.named_modules())
    names = {module: name for name, module in modules.items()}
    read, rows = dict[nn.Module | None, torch.Tensor](), []
    for layer in layers:
        around = [modules[name] for name in _above(names[layer])]
        embedding = None
        if all(getattr(around[0], name, True) for name in SWITCHES):
            embedding = _embedding(around)
            if not any(hasattr(each, EMBEDDING) for each in around):
                raise ValueError(
                    f"rotary positions: expected a module {EMBEDDING!r} beside or "
                    f"above each attention layer, got none for {names[layer]}"
                )
        if embedding not in read:
            read[embedding] = _read(embedding, layer)
        rows.append(read[embedding])
    kinds, of_layer = torch.stack(rows).unique(dim=0, return_inverse=True)
    half = kinds.shape[-1] // 4
    frequency, scaling, order = kinds.split([half, half, 2 * half], dim=-1)
    order = order.long()
    in_halves = bool((order == torch.arange(order.shape[-1]).to(order.device)).all())
    if in_halves and len(kinds) == 1:
        return Rope(frequency[0], float(scaling[0, 0]))
    return Rope(frequency, scaling, of_layer, None if in_halves else order)


def _above(name: str) -> Iterator[str]:
    """Yield the names of the modules around one, the nearest first."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def _embedding(around: Sequence[nn.Module]) -> nn.Module | None:
    """Return the rotary embedding that is nearest to an attention layer."""
    found = (getattr(module, EMBEDDING, None) for module in around)
    return next((each for each in found if each is not None), None)


def _read(embedding: Any, layer: Any) -> torch.Tensor:
    """Return how one layer rotates, see `_row`.

    Args:
        embedding: None for a layer that does not rotate.

    Raises:
        ValueError: a rotary embedding of a kind that is not known.
    """
    size = layer.head_size
    if embedding is None:
        none = torch.zeros(0, dtype=torch.float64, device=next(layer.buffers()).device)
        return _row(none, 1.0, True, size)
    table = _table(embedding)
    if table is None:
        return _row(*_of_transformers(embedding), size)
    if table.dim() != 2 or not table.shape[-1] <= size == embedding.head_size:
        raise _unknown(embedding)
    rope = rope_of_table(table)
    is_neox = getattr(embedding, "is_neox_style", True)  # LongRoPE knows no other
    return _row(rope.inv_freq, rope.scaling, is_neox, size)


def _unknown(embedding: Any) -> ValueError:
    return ValueError(
        "rotary positions: expected a rotary embedding that turns pairs of channels by "
        f"frequencies of its own, got {type(embedding).__name__}"
    )


def _table(embedding: Any) -> torch.Tensor | None:
    """Return the table [positions, width] of a module of vLLM, None for others."""
    both = getattr(embedding, "long_short_cos_sin_cache", None)
    if both is None:
        return getattr(embedding, "cos_sin_cache", None)
    num_short = embedding.original_max_position_embeddings
    return both[num_short:] if embedding.use_long_rope else both[:num_short]


def _of_transformers(embedding: Any) -> tuple[torch.Tensor, float, bool]:
    """Return frequencies, their factor, and whether halves rather than neighbours turn.

    Turning every channel by a quarter shows which ones are pairs.
    """
    kind = "full_attention_" if hasattr(embedding, "full_attention_inv_freq") else ""
    frequency = getattr(embedding, f"{kind}inv_freq", None)
    source = sys.modules[type(embedding).__module__]
    turn = getattr(source, "apply_rotary_pos_emb", None)
    if frequency is None or turn is None:
        raise _unknown(embedding)
    one = torch.eye(2 * len(frequency), device=frequency.device)
    angles = 0 * one[None], 0 * one[None] + 1  # cosines and sines of a quarter
    try:
        turned = turn(one[None, None], one[None, None], *angles)
    except TypeError as error:
        raise _unknown(embedding) from error
    for is_neox in (True, False):
        first, second = _order(len(one), is_neox).to(one.device).chunk(2)
        quarter = one.clone()
        quarter[first], quarter[second] = one[second], -one[first]
        if torch.equal(turned[0][0, 0], quarter):
            scaling = float(getattr(embedding, f"{kind}attention_scaling"))
            return frequency.double(), scaling, is_neox
    raise _unknown(embedding)


def _row(
    frequency: torch.Tensor, scaling: float, is_neox: bool, size: int
) -> torch.Tensor:
    """Return [2 D] float64 numbers of a rotation of the first channels of a head.

    They are D/2 frequencies and D/2 factors of channel pairs, and D channels, see
    `Rope`. Channels that stay are pairs of frequency 0.
    """
    turning = _order(2 * len(frequency), is_neox).view(2, -1)
    staying = torch.arange(turning.numel(), size).view(2, -1)
    order = torch.cat([turning, staying], 1).flatten().to(frequency)
    num_still = staying.shape[1]
    factors = F.pad(torch.full_like(frequency, scaling), (0, num_still), value=1.0)
    return torch.cat([F.pad(frequency, (0, num_still)), factors, order])


def _order(width: int, is_neox: bool) -> torch.Tensor:
    """Return channels: the first ones of all pairs, then the second ones."""
    channels = torch.arange(width)
    return channels if is_neox else channels.view(-1, 2).T.flatten()


def rope_of_table(table: torch.Tensor) -> Rope:
    """Recover frequencies from cosines and sines at positions 0, 1, 2...

    The angle at position 1 gives a first estimate. Each doubling of the position, whose
    full turns follow from the estimate, halves its error.

    Args:
        table: [positions, D] floating point, D/2 cosines, then D/2 sines.
    """
    cos, sin = table.double().chunk(2, dim=-1)
    scaling = float(torch.hypot(cos[0], sin[0]).mean())
    angles = torch.atan2(sin, cos)
    frequency, position = angles[1], 2
    while position < len(table):
        turns = ((frequency * position - angles[position]) / math.tau).round()
        frequency = (angles[position] + turns * math.tau) / position
        position *= 2
    return Rope(frequency, scaling)
