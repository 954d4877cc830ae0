"""Page ids and views of a cache, in one allocation and apart, against indexing."""

import math

import pytest
import torch

from vllm_kvpolicy.worker.pages import PagePool

LAYERS, BLOCKS, HEADS, SIZE, DIM = 3, 5, 2, 4, 6
LAYOUTS = ["one", "apart"]
ORDERS = [False, True]


def make_caches(layout: str) -> list[torch.Tensor]:
    """Return [B, H, N, 2D] per layer, every number different."""
    shape = (LAYERS, BLOCKS, HEADS, SIZE, 2 * DIM)
    whole = torch.arange(math.prod(shape)).view(shape).float()
    return [layer if layout == "one" else layer.clone() for layer in whole]


def expected(page: torch.Tensor, columns: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values [N, D] of one page [N, 2D], as the kernels lay it out."""
    if not columns:
        return page[:, :DIM], page[:, DIM:]
    numbers = page.flatten()
    keys, values = numbers[: SIZE * DIM], numbers[SIZE * DIM :]
    return keys.view(DIM, SIZE).T, values.view(SIZE, DIM)


@pytest.mark.parametrize("columns", ORDERS, ids=["rows", "columns"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_id_names_the_stock_page(layout: str, columns: bool) -> None:
    caches = make_caches(layout)
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
        assert torch.equal(pool.pages_of(layer)[page, 0], stock)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ids_are_unique_where_pages_may_meet(layout: str) -> None:
    pool = PagePool(make_caches(layout), False)
    ids = pool.own_pages(torch.arange(BLOCKS)[None])[0]
    is_one = layout == "one"
    assert pool.spans_layers == is_one
    assert pool.num_groups == (1 if is_one else LAYERS)
    groups = ids.reshape(pool.num_groups, -1)
    for group in groups:
        assert sorted(group.tolist()) == list(range(groups.shape[-1]))


@pytest.mark.parametrize("damage", ["order", "distance", "start"])
def test_layers_that_do_not_follow_each_other_lie_apart(damage: str) -> None:
    shape = (2 * LAYERS, BLOCKS, HEADS, SIZE, 2 * DIM)
    layers = list(torch.zeros(shape))
    chosen = {
        "order": layers[1::-1],
        "distance": layers[::2],
        "start": [layers[1], layers[3]],
    }[damage]
    assert not PagePool(chosen, False).spans_layers
    assert PagePool(layers[2:4], False).spans_layers


def test_token_major_caches_are_refused() -> None:
    cache = torch.zeros(BLOCKS, SIZE, HEADS, 2 * DIM).transpose(1, 2)
    with pytest.raises(ValueError, match="head-major"):
        PagePool([cache], False)
