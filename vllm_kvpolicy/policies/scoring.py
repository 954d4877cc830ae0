"""Scores plain tensors as a scorer does at an event, without an engine."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from vllm_kvpolicy.config_keys import DEFAULT_SINKS
from vllm_kvpolicy.kernels.rope import Rope
from vllm_kvpolicy.policies.base import EventInputs, Needs
from vllm_kvpolicy.policies.compose import build
from vllm_kvpolicy.policies.model_files import ModelShape
from vllm_kvpolicy.policies.names import SCORERS
from vllm_kvpolicy.policies.options import BaseOptions
from vllm_kvpolicy.policies.scorers._signals import signals_from_hidden
from vllm_kvpolicy.policies.words import Word


class ScoreOptions(BaseOptions):
    """What `score` reads beside the scorer's own options."""

    sinks: int = Field(
        DEFAULT_SINKS,
        ge=0,
        description="number of leading tokens that some scorers leave out",
    )


def score(
    name: str,
    k: Tensor,
    v: Tensor,
    q: Tensor,
    positions: Tensor,
    rope_theta: float,
    **params: Any,
) -> Tensor:
    """Score the tokens of one layer.

    Args:
        name: a scorer, a word of `policies.names.SCORERS`, or a user's own.
        k: [Hk, T, D] floating point, cached post-RoPE keys, oldest first.
        v: [Hk, T, D] floating point, cached values.
        q: [Hq, W, D] floating point, the newest W post-RoPE queries, newest last; query
            w has position `positions[T - W + w]`. W may be 0 for scorers without
            queries.
        positions: [T] integers, ascending.
        rope_theta: base of the rotary embedding.
        **params: the scorer's options, named as in `--kv-policy-config`, but `window`,
            `kernel` and `calibration` for its queries, its pooling and its file. The
            window is all queries given unless `window` says less. A calibration is of
            one layer. `sinks`: leading tokens (default 4) that expected, lagkv and
            triattention leave out, and rpc as its prompt. `state` [Hk, T], for h2o:
            what it returned last, zero for newer tokens. `hidden` [N, S + 1, d], for
            epikv: outputs of all N layers at the prompt's last token and all S later.

    Returns:
        [Hk, T] float32, higher is kept sooner.

    Raises:
        ValueError: parameters that are missing, wrong, or do not fit together.
    """
    word = SCORERS.find(name)
    if word is None:
        raise ValueError(f"name: got {name!r}, expected one of {', '.join(SCORERS)}")
    _check_shapes(k, v, q, positions)
    positions, (num_heads, _, size) = positions.long(), k.shape
    keys = _option_keys(word)
    options = {keys[key]: value for key, value in params.items() if key in keys}
    if "window" in keys and q.shape[1]:
        options.setdefault(keys["window"], q.shape[1])
    policy: Any = build(name, options)
    needs = policy.needs
    policy.scorer.check_model(ModelShape(1, len(q), num_heads, size))
    _check_params(name, params, (*keys, *ScoreOptions.model_fields), _tensors_of(needs))
    _check_queries(needs, q, positions)
    rope = Rope.from_theta(rope_theta, size)
    inputs = EventInputs(
        **_rows(needs, k, v, params),
        **_history(needs, k, positions, params),
        scale=size**-0.5,
        queries=q[None, None] if needs.window_tokens else None,
        positions=positions.expand(1, 1, num_heads, -1) if needs.positions else None,
        rope=Rope(rope.inv_freq.to(k.device)) if needs.rope else None,
    )
    return policy.decide(inputs, budget=1).score[0, 0].contiguous()


def _option_keys(word: type[Word]) -> dict[str, str]:
    """Map the parameters of `score` to keys of `--kv-policy-config`."""
    keys = {}
    for key in word.Options.model_fields:
        name = "window" if key == word.query_window else key
        for short in ("kernel", "calibration"):
            name = short if name.endswith(f"_{short}") else name
        keys[name] = key
    return keys


def _tensors_of(needs: Needs) -> tuple[str, ...]:
    asked = {"state": needs.memory, "hidden": needs.signals}
    return tuple(name for name, what in asked.items() if what)


def _rows(
    needs: Needs, k: Tensor, v: Tensor, params: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the fields of an event of one layer, None where `needs` asks for none."""
    own = {key: params[key] for key in ScoreOptions.model_fields if key in params}
    sinks = ScoreOptions(**own).sinks
    rows = (1, 1, *k.shape[:2])
    token = torch.arange(rows[3], device=k.device)
    return {
        "lengths": torch.full(rows[:3], rows[3], device=k.device),
        "must_keep": (token < sinks).expand(rows),
        "keys": k[None, None] if needs.keys else None,
        "values": v[None, None] if needs.values else None,
    }


def _history(
    needs: Needs, k: Tensor, positions: Tensor, params: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the fields about earlier tokens: the end, memory and signals."""
    fields: dict[str, Any] = {"end": positions[-1:] + 1}
    if needs.memory:
        state = params["state"]
        _expect("state", state, "[Hk, T]", state.shape == k.shape[:2])
        fields["memory"] = dict.fromkeys(needs.memory, state[None, None])
    if needs.signals:
        hidden = params["hidden"]
        # Reads a position on the host: this function serves no engine.
        end = int(positions[-1]) + 1
        fits = hidden.ndim == 3 and 0 < hidden.shape[1] <= end
        _expect("hidden", hidden, f"[N, S + 1 <= {end}, d]", fits)
        before = end - hidden.shape[1]
        measured = signals_from_hidden(needs.signals, hidden)
        fields["signals"] = {
            signal: F.pad(row, (before, 0)) for signal, row in measured.items()
        }
        fields["prompt_lengths"] = torch.full_like(positions[:1], before + 1)
    return fields


def _expect(name: str, tensor: Tensor, shape: str, fits: bool) -> None:
    if not fits:
        raise ValueError(f"{name}: expected {shape}, got {list(tensor.shape)}")


def _check_params(
    name: str,
    params: Mapping[str, Any],
    optional: tuple[str, ...],
    required: tuple[str, ...],
) -> None:
    for key in params:
        if key not in optional + required:
            raise ValueError(
                f"{key}: not a parameter of {name!r}, expected one of "
                f"{', '.join(optional + required)}"
            )
    for key in required:
        if params.get(key) is None:
            raise ValueError(f"{key}: got None, but {name!r} needs it")


def _check_queries(needs: Needs, q: Tensor, positions: Tensor) -> None:
    window = needs.window_tokens
    if q.shape[1] < window:
        raise ValueError(
            f"q: got {q.shape[1]} queries, expected the window of {window} or more"
        )
    if needs.rope and window and (positions[-window:].diff() != 1).any():
        raise ValueError(
            f"positions: expected the newest {window} to be consecutive, since they "
            "are the positions of the queries"
        )


def _check_shapes(k: Tensor, v: Tensor, q: Tensor, positions: Tensor) -> None:
    fits = (
        k.ndim == v.ndim == q.ndim == 3
        and k.numel() > 0
        and k.shape[:2] == v.shape[:2]
        and q.shape[0] % k.shape[0] == 0
        and q.shape[1] <= k.shape[1]
        and q.shape[2] == k.shape[2]
        and positions.shape == k.shape[1:2]
    )
    if not fits:
        raise ValueError(
            "k, v, q and positions: expected [Hk, T, D], [Hk, T, D], [Hk * G, W <= T, "
            f"D] and [T], got {list(k.shape)}, {list(v.shape)}, {list(q.shape)} and "
            f"{list(positions.shape)}"
        )
