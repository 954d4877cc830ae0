"""Page ids and views of a cache, against indexing."""

import math

import pytest
import torch

from vllm_kvpolicy.worker.pages import PagePool

LAYERS, BLOCKS, HEADS, SIZE, DIM = 3, 5, 2, 4, 6
ORDERS = [False, True]


def make_caches() -> list[torch.Tensor]:
    """Return [B, H, N, 2D] per layer, every number different."""
    shape = (LAYERS, BLOCKS, HEADS, SIZE, 2 * DIM)
    return list(torch.arange(math.prod(shape)).view(shape).float())


def expected(page: torch.Tensor, columns: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values [N, D] of one page [N, 2D], as the kernels lay it out."""
    if not columns:
        return page[:, :DIM], page[:, DIM:]
    numbers = page.flatten()
    keys, values = numbers[: SIZE * DIM], numbers[SIZE * DIM :]
    return keys.view(DIM, SIZE).T, values.view(SIZE, DIM)


@pytest.mark.parametrize("columns", ORDERS, ids=["rows", "columns"])
def test_every_id_names_the_stock_page(columns: bool) -> None:
    caches = make_caches()
    pool = PagePool(caches, columns)
    blocks = torch.tensor([[3, 0, 4], [1, 2, 2]])
    ids = pool.own_pages(blocks)
    assert ids.shape == (2, LAYERS, HEADS, 3)
    for event, layer, head, place in torch.cartesian_prod(
        *(torch.arange(size) for size in ids.shape)
    ).tolist():
        page = int(ids[event, layer, head, place])
        stock = caches[layer][blocks[event, place], head]
        keys, values = expected(stock, columns)
        assert torch.equal(pool.keys[layer][page], keys)
        assert torch.equal(pool.values[layer][page], values)
        assert torch.equal(pool.pages[page], stock)


def test_every_page_has_an_id_of_its_own() -> None:
    pool = PagePool(make_caches(), False)
    ids = pool.own_pages(torch.arange(BLOCKS)[None]).flatten()
    assert sorted(ids.tolist()) == list(range(len(pool.pages)))


@pytest.mark.parametrize("damage", ["order", "distance", "start"])
def test_layers_that_do_not_follow_each_other_are_refused(damage: str) -> None:
    shape = (2 * LAYERS, BLOCKS, HEADS, SIZE, 2 * DIM)
    layers = list(torch.zeros(shape))
    chosen = {
        "order": layers[1::-1],
        "distance": layers[::2],
        "start": [layers[1], layers[3]],
    }[damage]
    with pytest.raises(ValueError, match="in one allocation, in order"):
        PagePool(chosen, False)
    PagePool(layers[2:4], False)


def test_token_major_caches_are_refused() -> None:
    cache = torch.zeros(BLOCKS, SIZE, HEADS, 2 * DIM).transpose(1, 2)
    with pytest.raises(ValueError, match="head-major"):
        PagePool([cache], False)
