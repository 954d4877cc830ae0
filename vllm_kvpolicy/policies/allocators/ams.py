"""AMS: segments of equal attention mass, each with a share of the budget.

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

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from vllm_kvpolicy.kernels.ranking import (
    ascending_indices,
    limit_must_keep,
    top_k_mask,
)
from vllm_kvpolicy.kernels.segment_quota import (
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
from vllm_kvpolicy.policies.catalogue.options import AMS_PRESETS, check_ams_range

CREDIT = "ams_credit"  # name of the moving average in a policy's memory
MASS_EPS = 1e-12  # keeps a row without any attention a distribution


@dataclass(frozen=True)
class AMSConfig:
    """Parameters of AMS; the ranges are those of `params.AMS_PARAMS`.

    Args:
        segment_mass: mass between cuts (the paper's Delta), at least 0.001, below 1.
        min_segment: tokens, at least 1 (Lmin).
        max_segment: tokens, at least `min_segment` (Lmax).
        min_quota: tokens per segment, at least 0.
        sinks: first tokens of a row that `select` always keeps.
        recent: newest tokens of a row that `select` always keeps.
        ema_decay: share of the old credit that survives an event, 0 to 1 exclusive.
        ema_mix: share of the current mass, the rest being credit, 0 to 1. 1 takes the
            moving average out (ablation).
        quotas: what segments share the budget by, "mass" or "uniform" (ablation: all
            equally, so that the mass only cuts).
        segments: "mass", or "fixed" (ablation: blocks of `fixed_segment` tokens).
        fixed_segment: tokens per block, at least 1.
        parity: follow the authors' code literally, in float64, to compare with it.

    Raises:
        ValueError: a field outside its range.
    """

    segment_mass: float
    min_segment: int
    max_segment: int
    min_quota: int
    sinks: int
    recent: int
    ema_decay: float
    ema_mix: float
    parity: bool = False
    quotas: str = "mass"
    segments: str = "mass"
    fixed_segment: int = 128

    @property
    def cuts(self) -> dict[str, Any]:
        """Segmentation for `segment_quota_ref`; blocks are pieces of one segment."""
        if self.segments == "fixed":
            length = self.fixed_segment
            return {"segment_mass": 1.0, "min_segment": 1, "max_segment": length}
        names = ("segment_mass", "min_segment", "max_segment")
        return {name: getattr(self, name) for name in names}

    def __post_init__(self) -> None:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        for name in values:
            check_ams_range(name, values)


@dataclass(frozen=True)
class AMSPreset:
    """AMS parameters and the attention window that its mass is measured with.

    Args:
        config: parameters of the selection.
        window_tokens: queries in the window (W).
        pool_kernel: neighbours averaged over, odd.
        suffix_pad: mass of the newest W tokens, see `kernels.window_usage`.
    """

    config: AMSConfig
    window_tokens: int
    pool_kernel: int
    suffix_pad: str = "max"

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> "AMSPreset":
        """Build from resolved options; the default preset fills in the rest."""
        merged = {**AMS_PRESETS["default"], **options}
        names = [field.name for field in fields(AMSConfig)]
        return cls(
            config=AMSConfig(**{name: merged[name] for name in names}),
            window_tokens=merged["window"],
            pool_kernel=merged["pool_kernel"],
            suffix_pad=merged["suffix_pad"],
        )


PRESETS = {name: AMSPreset.from_options(values) for name, values in AMS_PRESETS.items()}


@dataclass(frozen=True)
class AMSSelection:
    """Result of `select`.

    Args:
        keep: [R, K] int64, token indices, ascending; -1 on the right of rows that hold
            fewer than K tokens.
        segments: [R, S, 2] int64, half-open (start, end), unused ones (length, length).
        quotas: [R, S] int64; add up to K in parity mode, else to K minus must-keep.
        credit: [R, K], credit of the kept tokens, float64 in parity mode, else float32.
    """

    keep: torch.Tensor
    segments: torch.Tensor
    quotas: torch.Tensor
    credit: torch.Tensor


@dataclass(frozen=True)
class AMSChoice:
    """Result of `choose`: as `AMSSelection`, before the survivors are gathered.

    Args:
        keep: [R, T] bool.
        segments: [R, S, 2] int64.
        quotas: [R, S] int64.
        credit: [R, T], zero on padding.
        mass: [R, T] float64, adds up to 1, zero on padding.
    """

    keep: torch.Tensor
    segments: torch.Tensor
    quotas: torch.Tensor
    credit: torch.Tensor
    mass: torch.Tensor


def select(
    usage: torch.Tensor,
    score: torch.Tensor,
    budget: int,
    config: AMSConfig,
    credit: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
) -> AMSSelection:
    """Choose `budget` tokens per row, with sinks and recent tokens from `config`.

    Args:
        usage: [R, T] floating point, pooled and padded window usage; negative values
            and NaN count as zero.
        score: [R, T] floating point, higher is kept sooner within a segment.
        budget: K, tokens per row, at most T and at most every row's length.
        config: parameters.
        credit: [R, <= T], what the last call returned; newer tokens start at zero.
            None at a first event.
        lengths: [R] int64, tokens per row where rows are right-padded, else T.

    Returns:
        Kept indices, segments, quotas and the credit of the kept tokens.

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


def choose(
    usage: torch.Tensor,
    score: torch.Tensor,
    must_keep: torch.Tensor,
    lengths: torch.Tensor,
    budget: int,
    config: AMSConfig,
    credit: torch.Tensor | None,
    candidates: torch.Tensor | None = None,
) -> AMSChoice:
    """Choose `budget` tokens per row around a given must-keep set.

    Args:
        usage: [R, T] floating point, see `select`.
        score: [R, T] floating point.
        must_keep: [R, T] bool, at most `budget` per row, False on padding.
        lengths: [R] int64.
        budget: K, tokens per row; a row that has less keeps all.
        config: parameters; `sinks` and `recent` are not read here.
        credit: [R, T] or None.
        candidates: [R, T] bool, what may be chosen, must-keep tokens included.

    Returns:
        A mask with `budget` True per row, segments, quotas and the new credit.
    """
    valid = torch.arange(usage.shape[-1], device=usage.device) < lengths[:, None]
    mass, credit = mass_with_credit(usage, valid, credit, config)
    # The code's quotas are blind to the must-keep set, ours are for what it leaves.
    barred = ~valid if candidates is None else ~candidates
    exempt = barred if config.parity else must_keep | barred
    room = lengths * 0 + budget - (0 if config.parity else must_keep.sum(-1))
    # The code's own sums are of floating point: only the reference has them.
    share = segment_quota_ref if config.parity else segment_quota
    shared = share(
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


def mass_with_credit(
    usage: torch.Tensor,
    valid: torch.Tensor,
    credit: torch.Tensor | None,
    config: AMSConfig,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn usage into mass, and mix in the moving average of past mass.

    With m the normalised usage: c = decay * c_old + (1 - decay) * m, and the mass is
    mix * m + (1 - mix) * c / sum(c). At a first event both terms are m.

    Args:
        usage: [R, T] floating point.
        valid: [R, T] bool, False on padding.
        credit: [R, T] c_old, or None at a first event.
        config: parameters.

    Returns:
        mass [R, T] float64, adding up to 1, and c [R, T], float64 in parity mode, else
        float32; both zero on padding.
    """
    normalise = _normalise_as_code if config.parity else _normalise
    mass = normalise(usage, valid)
    if credit is None:
        updated = (1 - config.ema_decay) * mass
        mixed = mass
    else:
        old = torch.where(valid, credit.double(), 0.0)
        updated = config.ema_decay * old + (1 - config.ema_decay) * mass
        mixed = config.ema_mix * mass + (1 - config.ema_mix) * normalise(updated, valid)
        if config.parity:
            mixed = normalise(mixed, valid)
    return mixed, updated if config.parity else updated.float()


def _normalise_as_code(values: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Shift by MASS_EPS and scale [R, T] to sum 1 per row, in float64."""
    positive = torch.where(valid, values.double().clamp(min=0) + MASS_EPS, 0.0)
    return positive / positive.sum(-1, keepdim=True)


def _normalise(values: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """As `_normalise_as_code`, but no result depends on padding or on a sum's order.

    Values are rounded to 2^-32 of the row's largest one and added up as integers.
    """
    finite = values.double().nan_to_num(nan=0.0, posinf=torch.finfo(torch.float32).max)
    positive = torch.where(valid, finite.clamp(min=0) + MASS_EPS, 0.0)
    units = (positive / positive.amax(-1, keepdim=True) * 2**32).round().long()
    return units.double() / units.sum(-1, keepdim=True).double()


def _sinks_and_recent(
    lengths: torch.Tensor, num_tokens: int, budget: int, config: AMSConfig
) -> torch.Tensor:
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
    usage: torch.Tensor,
    score: torch.Tensor,
    budget: int,
    credit: torch.Tensor | None,
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


class AMSAllocator:
    """AMS over any scorer; mass comes from the window, choice from the score."""

    def __init__(self, preset: AMSPreset) -> None:
        self.preset = preset
        self.needs = Needs(
            window_tokens=preset.window_tokens,
            usage=True,
            keys=True,
            memory=(CREDIT,),
        )

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> "AMSAllocator":
        """Build from options that `registry.resolve_options` has checked."""
        return cls(AMSPreset.from_options(options))

    def choose(
        self,
        score: torch.Tensor,
        inputs: EventInputs,
        usage: WindowUsage | None,
        budget: int,
    ) -> Decision:
        """Pick `budget` tokens per row of `score` [E, L, H, T], must-keep first."""
        usage = measured(usage)
        shape = score.shape
        mass = pooled_usage(
            mean_over_group(usage.mean, shape[2]),
            usage.lengths,
            usage.window,
            self.preset.pool_kernel,
            self.preset.suffix_pad,
        )
        must_keep = limit_must_keep(inputs.must_keep, budget)
        credit = inputs.memory.get(CREDIT)
        choice = choose(
            mass.flatten(0, 2),
            score.reshape(-1, shape[-1]),
            must_keep.flatten(0, 2),
            inputs.lengths.flatten(),
            budget,
            self.preset.config,
            None if credit is None else credit.flatten(0, 2),
            None if inputs.candidates is None else inputs.candidates.flatten(0, 2),
        )
        memory = {CREDIT: choice.credit.float().view(shape)}
        notes = {
            name: getattr(choice, name).unflatten(0, shape[:3])
            for name in ("mass", "segments", "quotas")
        }
        return Decision(choice.keep.view(shape), score, memory, notes)
