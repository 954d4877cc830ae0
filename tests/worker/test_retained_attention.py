"""Notes for the trace: attention that a choice retains, and what AMS based it on."""

from dataclasses import replace

import torch

from support.event_inputs import (
    EVENTS,
    HEADS,
    LAYERS,
    ROWS,
    SHORTEST,
    make_inputs,
    window_logits,
)
from vllm_kvpolicy.kernels.ranking import limit_must_keep
from vllm_kvpolicy.policies.base import Decision, EventInputs, Needs
from vllm_kvpolicy.policies.compose import build
from vllm_kvpolicy.worker.observers.trace import with_attention

NEEDS = Needs(window_tokens=16, keys=True)
SHAPE = (EVENTS, LAYERS, HEADS)


def notes_of(inputs: EventInputs, keep: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the notes on a choice of tokens."""
    return dict(with_attention(Decision(keep, keep.float()), NEEDS, inputs).notes)


def test_against_softmax_in_loops() -> None:
    inputs = make_inputs(NEEDS)
    generator = torch.Generator().manual_seed(1)
    keep = torch.rand(inputs.must_keep.shape, generator=generator) < 0.4
    keep = (keep | inputs.must_keep) & inputs.valid
    notes = notes_of(inputs, keep)
    assert set(notes) == {"retained_mass", "lse_drop", "density_60", "density_90"}
    for row in ROWS:
        logits = window_logits(inputs, row, NEEDS.window_tokens).amax(0)
        kept = keep[row][: logits.shape[-1]]
        share = logits.softmax(-1)
        drop = logits.logsumexp(-1) - logits[:, kept].logsumexp(-1)
        running = share.sort(descending=True).values.cumsum(-1)
        expected = {
            "retained_mass": share[:, kept].sum(-1).mean(),
            "lse_drop": drop.mean(),
            "density_60": ((running < 0.6).sum(-1) + 1.0).mean() / logits.shape[-1],
            "density_90": ((running < 0.9).sum(-1) + 1.0).mean() / logits.shape[-1],
        }
        for name, value in expected.items():
            got = notes[name][row]
            torch.testing.assert_close(got.double(), value.double(), rtol=1e-5, atol=0)


def test_rows_that_a_short_request_does_not_have_do_not_count() -> None:
    inputs = make_inputs(NEEDS, lengths=(((9, 12),),), local=(3,), width=14)
    assert torch.equal(
        notes_of(inputs, inputs.valid)["retained_mass"], torch.ones(1, 1, 2)
    )


def test_a_choice_without_any_attention_drops_finitely() -> None:
    inputs = make_inputs(NEEDS)
    notes = notes_of(inputs, torch.zeros_like(inputs.must_keep))
    assert torch.equal(notes["retained_mass"], torch.zeros(SHAPE))
    limit = 32 * torch.tensor(2.0).log()
    torch.testing.assert_close(notes["lse_drop"], limit.expand(SHAPE))


def test_only_the_policys_own_window_counts() -> None:
    inputs = make_inputs(NEEDS, window=24)
    older = inputs.queries.clone()
    older[..., :8, :] = torch.nan
    notes = notes_of(inputs, inputs.must_keep)
    for name, value in notes_of(
        replace(inputs, queries=older), inputs.must_keep
    ).items():
        assert torch.equal(value, notes[name]), name


def test_policies_that_read_no_queries_get_no_notes() -> None:
    inputs = make_inputs(Needs(keys=True))
    decision = Decision(inputs.valid, inputs.valid.float())
    assert with_attention(decision, Needs(keys=True), inputs) is decision
    assert with_attention(decision, Needs(window_tokens=4), inputs) is decision


def test_ams_notes_mass_segments_and_quotas() -> None:
    policy = build("ams-snapkv", {})
    inputs = make_inputs(policy.needs)
    notes = policy.decide(inputs, SHORTEST).notes
    mass, segments = notes["mass"], notes["segments"]
    assert mass.shape == inputs.must_keep.shape
    torch.testing.assert_close(mass.sum(-1), torch.ones(SHAPE).double())
    assert not mass[~inputs.valid].any()
    starts, ends = segments.unbind(-1)
    assert torch.equal(starts[..., 1:], ends[..., :-1])
    assert torch.equal(ends[..., -1], inputs.lengths) and not starts[..., 0].any()
    must_keep = limit_must_keep(inputs.must_keep, SHORTEST)
    assert torch.equal(notes["quotas"].sum(-1), SHORTEST - must_keep.sum(-1))
    more = with_attention(policy.decide(inputs, SHORTEST), policy.needs, inputs).notes
    assert {*notes, "lse_drop"} < set(more)
