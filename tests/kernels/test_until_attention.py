"""Attention that sees tokens until a position, by the reference: chunks and parts."""

import pytest
import torch

from support.twins_of_until_attention import *  # noqa: F403
from support.twins_of_until_attention import PROMPTS, check_step, run
from support.worker.until_rows import Row, Step
from vllm_kvpolicy.kernels import visibility as module
from vllm_kvpolicy.kernels.visibility import until_attention


def test_all_kept_is_causal_and_none_kept_a_window() -> None:
    everything = Step([Row(50, 50, kept=1.0)])
    keys, values = (
        part[everything.tables[0].long()].flatten(0, 1)[:50]
        for part in (everything.keys, everything.values)
    )
    query = everything.query.transpose(0, 1)
    causal = torch.ones(50, 50, dtype=torch.bool).tril()
    for kept, mask in ((1.0, causal), (0.0, causal.triu(-7))):  # a window of 8
        step = Step([Row(50, 50, kept=kept)])
        assert torch.equal(step.query.transpose(0, 1), query)
        want = torch.nn.functional.scaled_dot_product_attention(
            query, keys[None], values[None], attn_mask=mask, scale=step.scale
        )
        torch.testing.assert_close(check_step(step), want.transpose(0, 1))


@pytest.mark.parametrize("cuts", [(0, 50), (0, 16, 17, 50), tuple(range(51))])
def test_chunks_see_what_the_whole_prompt_sees(cuts: tuple[int, ...]) -> None:
    """The same pages, filled further in each step."""
    whole = Step([Row(50, 50)])
    want = check_step(whole)
    for first, end in zip(cuts, cuts[1:], strict=False):
        arguments = whole.arguments()
        arguments["query"] = whole.query[first:end]
        arguments["output"] = torch.full_like(arguments["query"], torch.nan)
        arguments["query_start"] = torch.tensor([0, end - first]).int()
        arguments["lengths"] = arguments["ends"] = torch.tensor([end]).int()
        arguments["max_queries"] = end - first
        until_attention(*arguments.values())
        torch.testing.assert_close(arguments["output"], want[first:end])


def test_parts_of_rows_and_of_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is bounded by taking some rows, and some of their queries, at a time."""
    want = run(Step(PROMPTS))
    monkeypatch.setattr(module, "QUERIES", 16)
    monkeypatch.setattr(module, "CHUNK_BYTES", 1)
    torch.testing.assert_close(run(Step(PROMPTS)), want)


def test_queries_of_no_row_and_larger_bounds() -> None:
    step = Step(PROMPTS)
    arguments = step.arguments()
    arguments["query"] = torch.cat((step.query, step.query[:3]))
    arguments["output"] = torch.full_like(arguments["query"], torch.nan)
    arguments["max_queries"] = 150
    until_attention(*arguments.values())
    got = arguments["output"][: len(step.query)]
    torch.testing.assert_close(got.double(), step.expected, rtol=1e-5, atol=1e-6)


def test_a_position_off_by_one_shows() -> None:
    step = Step([Row(150, 37, window=20)])
    want = run(step)
    for off in (1, -1):
        arguments = step.arguments()
        arguments["ends"] = arguments["ends"] + off
        until_attention(*arguments.values())
        differs = (arguments["output"] != want).flatten(1).any(1)
        assert differs.sum() > 20


def test_rows_are_by_themselves() -> None:
    together = Step(PROMPTS)
    want = run(together)
    arguments = together.arguments()
    alone = {name: arguments[name][:1] for name in ("tables", "lengths", "ends")}
    arguments |= alone | {"query_start": arguments["query_start"][:2]}
    until_attention(*arguments.values())
    torch.testing.assert_close(arguments["output"][:37], want[:37])
