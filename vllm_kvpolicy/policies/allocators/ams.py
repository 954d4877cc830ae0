"""AMS: segments of equal attention mass, each with a share of the budget.

mass_i = mix * m_i + (1 - mix) * c_i / sum(c), m_i = usage_i / sum(usage) and c its
moving average over events, c_i = decay * c_i + (1 - decay) * m_i. A segment ends where
the running sum of mass passes a multiple of `segment_mass`; too short ones are merged,
too long ones split. Segments share the budget in proportion to their mass, at least
`min_quota` each, and keep their best tokens by score.

Source: AMS, Adaptive Mass-Segmented KV compression (arXiv 2605.23200) section 3 and
https://github.com/EIT-NLP/AdaptiveMassSegment/blob/7eb32cd75600c55888f223dddd2827a81d4f6a80/kvpress/presses/adaptive_segment_head_press.py.
Deviations, unless `parity` asks for the code's own rules: must-keep tokens first and
quotas on what is left of the budget, as the paper says (the code shares out the whole
budget, then drops the lowest scores below any floor); sinks before recent tokens when
both do not fit, as the paper says; sums in fixed point; one mass per row, not averaged
over requests; exactly K tokens (the code keeps K or K + 1). Of the ablations, `quotas`
is "uniform" here (the code's own leaves quotas as they are at a first event).
Axes: R rows, one per (request, layer, KV head); T tokens (right-padded); K budget.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from pydantic import AfterValidator, Field
from torch import Tensor

from vllm_kvpolicy.config_keys import DEFAULT_RECENT, DEFAULT_SINKS
from vllm_kvpolicy.kernels.ranking import ascending_indices, limit_must_keep, top_k_mask
from vllm_kvpolicy.kernels.segment_quota import (
    MASS_EPS,
    credited_mass,
    pick_by_quota,
    segment_quota,
    segment_quota_ref,
    to_fixed_point,
)
from vllm_kvpolicy.kernels.window_usage import (
    WindowUsage,
    mean_over_group,
    measured,
    pooled_usage,
)
from vllm_kvpolicy.policies.base import Decision, EventInputs, Needs
from vllm_kvpolicy.policies.options import (
    MOST_TOKENS,
    AtLeast,
    PoolOptions,
    Share,
    Tokens,
)
from vllm_kvpolicy.policies.words import RECENCY, BaseAllocator

CREDIT = "ams_credit"  # name of the moving average in a policy's memory


class AMSOptions(PoolOptions):
    """Options of `ams`.

    The defaults are Table 15 of the paper with the window of the authors' code: of the
    settings tried, the one whose segment counts come closest to the paper's Table 14.
    """

    preset: Literal["default", "paper", "code"] = Field(
        "default", description="named set of defaults for the keys that are not given"
    )
    segment_mass: float = Field(
        0.1, ge=0.001, lt=1, description="attention mass of a segment"
    )
    min_segment: Tokens = Field(
        16, description="minimum segment length in tokens; shorter segments are merged"
    )
    max_segment: Annotated[Tokens, AfterValidator(AtLeast("min_segment"))] = Field(
        256, description="maximum segment length in tokens; longer segments are split"
    )
    min_quota: int = Field(
        1, ge=0, le=MOST_TOKENS, description="minimum quota of a segment in tokens"
    )
    ema_decay: float = Field(
        0.9,
        ge=0,
        lt=1,
        description="weight of the credit from earlier events at each event",
    )
    ema_mix: Share = Field(
        0.9,
        description="weight of the current mass in the average; 1 uses no earlier "
        "events",
    )
    quotas: Literal["mass", "uniform"] = Field(
        "mass", description="how segments share the budget: by mass, or equally"
    )
    segments: Literal["mass", "fixed"] = Field(
        "mass",
        description="segment boundaries: by mass, or every `fixed_segment` tokens",
    )
    fixed_segment: Tokens = Field(
        128, description="segment length in tokens if `segments` is fixed"
    )
    suffix_pad: Literal["max", "mean", "none"] = Field(
        "max", description="mass assigned to each of the newest `window` tokens"
    )
    parity: bool = Field(False, description="reproduce the authors' code exactly")

    @property
    def cuts(self) -> dict[str, Any]:
        """Segmentation for `segment_quota_ref`; blocks are pieces of one segment."""
        if self.segments == "fixed":
            length = self.fixed_segment
            return {"segment_mass": 1.0, "min_segment": 1, "max_segment": length}
        names = ("segment_mass", "min_segment", "max_segment")
        return {name: getattr(self, name) for name in names}


PRESETS: dict[str, dict[str, Any]] = {
    "default": {},
    # Table 15 as printed; the paper leaves the number of recent tokens open.
    "paper": {"window": 128},
    # The defaults of the authors' evaluation registry.
    "code": {
        "segment_mass": 0.02,
        "min_segment": 32,
        "max_segment": 1024,
        "min_quota": 8,
        "ema_decay": 0.8,
        "ema_mix": 0.7,
    },
}


class AMSConfig(AMSOptions):
    """Parameters of AMS: the word's options, with the tokens that `select` keeps.

    Args:
        sinks: first tokens of a row that `select` always keeps; a server has a flag.
        recent: newest tokens of a row that `select` always keeps; likewise.

    Raises:
        ValueError: a field outside its range.
    """

    sinks: int = Field(DEFAULT_SINKS, ge=0)
    recent: int = Field(DEFAULT_RECENT, ge=0)


@dataclass(frozen=True)
class AMSChoice:
    """Result of `choose`.

    Args:
        keep: [R, T] bool, `budget` True per row.
        segments: [R, S, 2] int64, half-open (start, end), unused ones (length, length).
        quotas: [R, S] int64; add up to K in parity mode, else to K minus must-keep.
        credit: [R, T], float64 in parity mode, else float32; zero on padding.
        mass: [R, T] float64, adds up to 1, zero on padding.
    """

    keep: Tensor
    segments: Tensor
    quotas: Tensor
    credit: Tensor
    mass: Tensor


def choose(
    usage: Tensor,
    score: Tensor,
    must_keep: Tensor,
    lengths: Tensor,
    budget: int,
    config: AMSOptions,
    credit: Tensor | None,
    candidates: Tensor | None = None,
) -> AMSChoice:
    """Choose `budget` tokens per row around a given must-keep set.

    Args:
        usage: [R, T] floating point, see `select`.
        score: [R, T] floating point.
        must_keep: [R, T] bool, at most `budget` per row, False on padding.
        lengths: [R] int64.
        budget: K, tokens per row; a row that has less keeps all.
        credit: [R, T] or None.
        candidates: [R, T] bool, what may be chosen, must-keep tokens included.
    """
    valid = torch.arange(usage.shape[-1], device=usage.device) < lengths[:, None]
    if config.parity:
        mass, credit = mass_as_code(usage, valid, credit, config)
    else:
        share = config.ema_decay, config.ema_mix
        mass, credit = credited_mass(usage, lengths, credit, *share)
    # The code's quotas are blind to the must-keep set, ours are for what it leaves.
    barred = ~valid if candidates is None else ~candidates
    exempt = barred if config.parity else must_keep | barred
    room = torch.full_like(lengths, budget)
    room = room if config.parity else room - must_keep.sum(-1)
    # The code's own sums are of floating point: only the reference has them.
    divide = segment_quota_ref if config.parity else segment_quota
    shared = divide(
        mass if config.parity else to_fixed_point(mass),
        lengths,
        exempt,
        torch.minimum(room, (~exempt).sum(-1)),
        min_quota=config.min_quota,
        by_mass=config.quotas == "mass",
        **config.cuts,
    )
    group = shared.segment_of.masked_fill(exempt, shared.quotas.shape[-1])
    picked = pick_by_quota(score, group, shared.quotas)
    if config.parity:
        keep = top_k_mask(score, must_keep, picked | must_keep, budget)
    else:
        keep = picked | must_keep
    return AMSChoice(keep, shared.segments, shared.quotas, credit, mass)


def mass_as_code(
    usage: Tensor, valid: Tensor, credit: Tensor | None, config: AMSOptions
) -> tuple[Tensor, Tensor]:
    """Do as `credited_mass_ref` by the rules of the code: all of it in float64 sums.

    Returns mass and credit, both [R, T] float64; `valid` [R, T] is False on padding.
    """
    mass = _normalise_as_code(usage, valid)
    if credit is None:
        return mass, (1 - config.ema_decay) * mass
    old = torch.where(valid, credit.double(), 0.0)
    updated = config.ema_decay * old + (1 - config.ema_decay) * mass
    mixed = config.ema_mix * mass
    mixed = mixed + (1 - config.ema_mix) * _normalise_as_code(updated, valid)
    return _normalise_as_code(mixed, valid), updated


def _normalise_as_code(values: Tensor, valid: Tensor) -> Tensor:
    """Shift by MASS_EPS and scale [R, T] to sum 1 per row, in float64."""
    positive = torch.where(valid, values.double().clamp(min=0) + MASS_EPS, 0.0)
    return positive / positive.sum(-1, keepdim=True)


@dataclass(frozen=True)
class AMSSelection:
    """Result of `select`.

    Args:
        keep: [R, K] int64, token indices, ascending; -1 on the right of rows that hold
            fewer than K tokens.
        segments, quotas: see `AMSChoice`.
        credit: [R, K], of the kept tokens.
    """

    keep: Tensor
    segments: Tensor
    quotas: Tensor
    credit: Tensor


def select(
    usage: Tensor,
    score: Tensor,
    budget: int,
    config: AMSConfig,
    credit: Tensor | None = None,
    lengths: Tensor | None = None,
) -> AMSSelection:
    """Choose `budget` tokens per row of plain tensors, without an engine.

    With `parity` it does as the authors' own code. For example, one row of 64 tokens in
    which tokens 40 to 49 have all the attention:

        usage = torch.zeros(1, 64)
        usage[0, 40:50] = 1.0
        kept = select(usage, usage, 16, AMSConfig(sinks=2, recent=4, min_quota=0)).keep

    keeps the sinks 0 and 1, tokens 40 to 49, and the newest ones, 60 to 63.

    Args:
        usage: [R, T] floating point, pooled and padded window usage; negative values
            and NaN count as zero.
        score: [R, T] floating point, higher is kept sooner within a segment.
        budget: K, tokens per row, at most T and at most every row's length.
        credit: [R, <= T], what the last call returned; newer tokens start at zero.
            None at a first event.
        lengths: [R] int64, tokens per row where rows are right-padded, else T.

    Raises:
        ValueError: shapes that do not fit, or a budget outside 1..T.
    """
    num_rows, num_tokens = _check_rows(usage, score, budget, credit)
    if lengths is None:
        lengths = torch.full((num_rows,), num_tokens, device=usage.device)
    if credit is not None:
        credit = torch.nn.functional.pad(credit, (0, num_tokens - credit.shape[-1]))
    must_keep = _sinks_and_recent(lengths, num_tokens, budget, config)
    choice = choose(usage, score, must_keep, lengths, budget, config, credit)
    keep = ascending_indices(choice.keep, budget)
    kept_credit = choice.credit.gather(-1, keep.clamp(min=0)).masked_fill(keep < 0, 0.0)
    return AMSSelection(keep, choice.segments, choice.quotas, kept_credit)


def _sinks_and_recent(
    lengths: Tensor, num_tokens: int, budget: int, config: AMSConfig
) -> Tensor:
    """Mark each row's first and newest tokens, [R, T] bool, at most `budget`."""
    if config.parity:
        recent = min(config.recent, budget)
        sinks = min(config.sinks, budget - recent)
    else:
        sinks = min(config.sinks, budget)
        recent = min(config.recent, budget - sinks)
    position = torch.arange(num_tokens, device=lengths.device)
    is_recent = position >= lengths[:, None] - recent
    return ((position < sinks) | is_recent) & (position < lengths[:, None])


def _check_rows(
    usage: Tensor, score: Tensor, budget: int, credit: Tensor | None
) -> tuple[int, int]:
    """Return (R, T) or raise ValueError."""
    if usage.ndim != 2 or usage.shape != score.shape or usage.shape[-1] == 0:
        raise ValueError(
            "usage and score: expected the same shape [R, T >= 1], got "
            f"{list(usage.shape)} and {list(score.shape)}"
        )
    num_rows, num_tokens = usage.shape
    if not 1 <= budget <= num_tokens:
        raise ValueError(f"budget: expected 1..{num_tokens} tokens, got {budget}")
    if credit is not None and (
        credit.shape[:-1] != usage.shape[:-1] or credit.shape[-1] > num_tokens
    ):
        raise ValueError(
            f"credit: expected [{num_rows}, at most {num_tokens}], got "
            f"{list(credit.shape)}"
        )
    return num_rows, num_tokens


class AMSAllocator(BaseAllocator):
    """AMS over any scorer: mass comes from the window, choice from the score."""

    summary = "segments of equal attention mass, each with its own quota"
    source = "AMS, arXiv 2605.23200"
    reads_heads = False
    query_window = "window"
    presets = PRESETS
    refuses = {"streaming": RECENCY}
    needs = Needs(usage=True, keys=True, memory=(CREDIT,))
    Options = AMSOptions

    def choose(
        self, score: Tensor, inputs: EventInputs, usage: WindowUsage | None, budget: int
    ) -> Decision:
        usage = measured(usage)
        shape = score.shape
        mass = pooled_usage(
            mean_over_group(usage.mean, shape[2]),
            usage.lengths,
            usage.window,
            self.options.pool_kernel,
            self.options.suffix_pad,
        )
        must_keep = limit_must_keep(inputs.must_keep, budget)
        credit = inputs.memory.get(CREDIT)
        choice = choose(
            mass.flatten(0, 2),
            score.reshape(-1, shape[-1]),
            must_keep.flatten(0, 2),
            inputs.lengths.flatten(),
            budget,
            self.options,
            None if credit is None else credit.flatten(0, 2),
            None if inputs.candidates is None else inputs.candidates.flatten(0, 2),
        )
        memory = {CREDIT: choice.credit.float().view(shape)}
        notes = {
            name: getattr(choice, name).unflatten(0, shape[:3])
            for name in ("mass", "segments", "quotas")
        }
        return Decision(choice.keep.view(shape), score, memory, notes)
