"""Measures how much of the window's attention the chosen tokens retain, for a trace."""

from dataclasses import replace

from vllm_kvpolicy.kernels.nucleus import (
    WEIGHT_UNIT,
    nucleus_counts,
    retained_mass,
    window_mean,
)
from vllm_kvpolicy.policies.base import Decision, EventInputs, Needs

DENSITY_PERCENTS = (60, 90)


def with_attention(decision: Decision, needs: Needs, inputs: EventInputs) -> Decision:
    """Note the attention that a decision retains and how dense attention is.

    Notes, [E, L, H] float32, means over the queries of the policy's window:
        retained_mass: share of the attention that the chosen tokens hold;
        lse_drop: minus its logarithm, in nats: the LSE of all held tokens minus that
            of the chosen ones; at most 32 ln 2, the resolution of the weights;
        density_60, density_90: share of the held tokens that holds 60 and 90 % of the
            attention.

    Args:
        decision: the policy's.
        needs: the policy's.
        inputs: what it saw.

    Returns:
        The decision, with these notes where the policy reads queries and keys and the
        model has no learned sinks, whose share they do not count.
    """
    if inputs.sink_logits is not None or not (needs.window_tokens and needs.keys):
        return decision
    queries = inputs.given("queries")[..., -needs.window_tokens :, :]
    lengths = inputs.lengths
    window = (queries, inputs.given("keys"), lengths, inputs.scale)
    retained = retained_mass(*window, decision.keep)
    notes = {
        "retained_mass": 1 - window_mean(1 - retained, lengths),
        "lse_drop": window_mean(-retained.clamp(1 / WEIGHT_UNIT).log(), lengths),
    }
    for percent in DENSITY_PERCENTS:
        counts = nucleus_counts(*window, percent / 100)
        notes[f"density_{percent}"] = window_mean(counts, lengths) / lengths
    return replace(decision, notes={**decision.notes, **notes})
