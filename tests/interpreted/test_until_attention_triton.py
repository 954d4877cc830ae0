"""Attention that sees tokens until a position, in Triton: blocks, shares, offsets."""

import pytest
import torch

from support.scattered_pages import FAR, Make
from support.twins_of_until_attention import *  # noqa: F403
from support.twins_of_until_attention import BATCHES, DECODES, HALF, check_step, run
from support.worker.until_rows import Row, Step
from vllm_kvpolicy.kernels.triton import visibility as twin


@pytest.mark.parametrize("window", [33, 34])
def test_blocks_that_no_query_sees_are_left_out(
    monkeypatch: pytest.MonkeyPatch, window: int
) -> None:
    """Of a prompt without a kept token, tiles read their window and themselves.

    With 34 the first query of every other tile is the only one that sees the first
    block of its list, and one key of it.
    """
    made, lists_of_tiles = [], twin.lists_of_tiles

    def noted(*args: object) -> tuple[torch.Tensor, ...]:
        made.append(lists_of_tiles(*args))
        return made[-1]

    monkeypatch.setattr(twin, "lists_of_tiles", noted)
    check_step(
        Step([Row(1100, 300, kept=0.0, window=window, gone=0.0)], group=4, dtype=HALF)
    )
    lists, counts, tile_rows = made[0]
    queries, block = 32, 64  # of a tile of 128, keys of a block
    assert tile_rows.tolist() == [0] * 10 and lists.shape[1] == 18
    for tile in range(10):
        first = 800 + tile * queries
        seen = range((first - window + 1) // block, (first + 1) // block)
        assert lists[tile, : counts[tile]].tolist() == list(seen)


def test_more_blocks_than_are_sifted_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step([Row(700, 20, gone=0.2)])
    want = check_step(step)
    monkeypatch.setattr(twin, "LISTED", 4)
    monkeypatch.setattr(twin, "REACHES", 2)
    assert torch.equal(run(step), want)


@pytest.mark.parametrize("shares", [1, 3, 128])
def test_any_number_of_shares(shares: int, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step([Row(700, 1), Row(90, 1, kept=1.0), Row(2, 1)])
    monkeypatch.setattr(twin, "LEAST", 1)
    monkeypatch.setattr(twin, "SHARES", shares)
    monkeypatch.setattr(twin, "SHARES_AT_ONCE", 4)
    check_step(step)


def test_single_tokens_by_either_launch() -> None:
    step = Step(DECODES)
    got, want = run(step, max_queries=2), run(step)
    torch.testing.assert_close(got, want, rtol=2e-6, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", BATCHES)
def test_a_row_alone_has_the_same_results(name: str) -> None:
    step = Step(BATCHES[name])
    together, arguments = run(step), step.arguments()
    for number, row in enumerate(step.rows):
        if row.queries:
            at, start = slice(number, number + 1), arguments["query_start"][number]
            mine = slice(int(start), int(start) + row.queries)
            alone = {key: arguments[key][at] for key in ("tables", "lengths", "ends")}
            got = run(
                step,
                query=step.query[mine],
                output=torch.full_like(step.query[mine], torch.nan),
                query_start=torch.tensor([0, row.queries]).int(),
                **alone,
            )
            assert torch.equal(got, together[mine])


@pytest.mark.parametrize("name", BATCHES)
def test_strided_queries_and_queries_of_no_row(name: str) -> None:
    step = Step(BATCHES[name], group=4)
    want, count = run(step), len(step.query)
    wide = torch.full((count + 3, 9, 2 * 32), torch.nan)
    query, output = wide[:, 1:5, 32:], wide.clone()[:, 5:, :32]
    query[:count] = step.query
    run(step, query=query, output=output)
    assert torch.equal(output[:count], want) and output[count:].isnan().all()


@pytest.mark.parametrize("name", BATCHES)
def test_nothing_to_do(name: str) -> None:
    step = Step([Row(5, 1 + (name == "prompts"))])
    arguments = step.arguments()
    nobody = {key: arguments[key][:0] for key in ("tables", "lengths", "ends")}
    got = run(step, query_start=arguments["query_start"][:1], **nobody)
    assert got.isnan().all()
    nothing = torch.zeros(2, dtype=torch.int32)
    assert run(step, query_start=nothing).isnan().all()


@pytest.mark.parametrize("name", BATCHES)
def test_pages_beyond_int32_are_read(name: str, unbacked: Make) -> None:
    step = Step(BATCHES[name][:2], dtype=HALF)
    want, page = run(step), 16 * 64
    far = FAR // page
    # In the middle, so that an offset that wraps around reads zeros.
    memory = unbacked(2 * FAR + 100 * page, HALF)
    pool = memory[FAR:].as_strided((far + 50, 16, 64), (page, 64, 1))
    pool[far : far + len(step.keys)] = torch.cat((step.keys, step.values), -1)
    until = unbacked((far + 50) * 16, torch.int32).view(-1, 16)
    until[far : far + len(step.keys)] = step.until
    got = run(
        step,
        keys=pool[..., :32],
        values=pool[..., 32:],
        until=until,
        tables=step.tables + far,
    )
    assert torch.equal(got, want)
