"""An FP8 cache as policies see it: numbers times scales, bytes that move, merges."""

from types import SimpleNamespace

import pytest
import torch

from support.cpu import needs_float8
from vllm_kvpolicy import compat
from vllm_kvpolicy.kernels.compact_pages import merge_pages
from vllm_kvpolicy.kernels.visibility import until_attention
from vllm_kvpolicy.protocol import StepCommands, WindowCapture
from vllm_kvpolicy.sizes import query_rows
from vllm_kvpolicy.worker.captures.query_windows import QueryWindows
from vllm_kvpolicy.worker.pages import Float8, PagePool, check_layout
from vllm_kvpolicy.worker.step import Step

LAYERS, BLOCKS, HEADS, SIZE, DIM = 3, 5, 2, 32, 32
KINDS = {"fp8": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
PLAIN = (torch.float32, torch.bfloat16, torch.float16)
KEY_SCALES, VALUE_SCALES = (1.0, 0.37, 2.0), (0.5, 1.0, 0.0123)
CPU = torch.device("cpu")

kinds = pytest.mark.parametrize("kind", KINDS)


def float8(kind: str, dtype: torch.dtype = torch.float32) -> Float8:
    scales = {"keys": KEY_SCALES, "values": VALUE_SCALES}
    return Float8(KINDS[kind], dtype, scales, CPU)


def layer_of(kind: str, index: int, dtype: torch.dtype, cache: torch.Tensor) -> object:
    return SimpleNamespace(
        kv_cache=cache,
        kv_cache_dtype=kind,
        dtype=dtype,
        isa="vec",
        _k_scale_float=KEY_SCALES[index],
        _v_scale_float=VALUE_SCALES[index],
    )


def finite_bytes(kind: str, *shape: int, seed: int = 0) -> torch.Tensor:
    """Return random bytes [shape] that are numbers, of both signs."""
    drawn = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed))
    is_number = drawn.to(torch.uint8).view(KINDS[kind]).float().isfinite()
    return torch.where(is_number, drawn, 1).to(torch.uint8)


def make_pool(kind: str, columns: bool, dtype=torch.float32) -> PagePool:
    whole = finite_bytes(kind, LAYERS, BLOCKS, HEADS, SIZE, 2 * DIM)
    return PagePool(list(whole), columns, float8(kind, dtype))


def test_the_names_are_those_of_vllm() -> None:
    from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    names = {"auto", *compat.FLOAT8_CACHES}
    assert set(CPUAttentionBackend.supported_kv_cache_dtypes) == names
    for name, stored in compat.FLOAT8_CACHES.items():
        assert STR_DTYPE_TO_TORCH_DTYPE[name] is torch.uint8
        assert getattr(torch, stored).itemsize == 1


@kinds
def test_layers_tell_what_their_bytes_are(kind: str) -> None:
    cache = torch.zeros(1, dtype=torch.uint8)
    layers = [layer_of(kind, n, torch.bfloat16, cache) for n in range(LAYERS)]
    found = Float8.of_layers(layers)
    assert found is not None
    assert (found.stored, found.dtype) == (KINDS[kind], torch.bfloat16)
    assert tuple(found.scales["keys"]) == KEY_SCALES
    assert tuple(found.scales["values"]) == VALUE_SCALES
    assert Float8.of_layers([SimpleNamespace(kv_cache_dtype="bfloat16")]) is None


@pytest.mark.parametrize("dtype", PLAIN)
@pytest.mark.parametrize("columns", [False, True])
@kinds
def test_policies_read_numbers_times_the_scale_of_their_layer(
    kind: str, columns: bool, dtype: torch.dtype
) -> None:
    """A row's page may lie anywhere; what counts is whose row it is."""
    pool = make_pool(kind, columns, dtype)
    # Every layer's rows are on pages of another.
    pages = pool.own_pages(torch.tensor([[3, 0], [4, 1]])).roll(1, 1)
    count = SIZE + 5
    for name, scales in (("keys", KEY_SCALES), ("values", VALUE_SCALES)):
        views = pool.keys if name == "keys" else pool.values
        assert {view.dtype for view in views} == {KINDS[kind]}
        held = pool.held(name, pages, count)
        assert held.dense.dtype is dtype
        assert held.shape == (2, LAYERS, HEADS, count, DIM)
        for layer, scale in enumerate(scales):
            stored = views[layer].float()[pages[:, layer]].flatten(2, 3)[:, :, :count]
            assert torch.equal(held.dense[:, layer], (stored * scale).to(dtype))


@kinds
def test_tokens_move_as_bytes(kind: str) -> None:
    for columns in (False, True):
        pool = make_pool(kind, columns)
        views = pool.tokens
        assert {view.dtype for view in views} == {torch.uint8}
        storage = pool.pages.untyped_storage().data_ptr()
        assert {view.untyped_storage().data_ptr() for view in views} == {storage}


@needs_float8
@pytest.mark.parametrize("dtype", PLAIN)
@kinds
def test_the_layout_check_bears_any_rounding(
    policy_config, kind: str, dtype: torch.dtype
) -> None:
    """The CPU kernel rounds towards zero, after it has divided by the scale."""
    from vllm.config import set_current_vllm_config

    from vllm_kvpolicy.worker.backends.cpu import KVPolicyCPUImpl

    with set_current_vllm_config(policy_config):
        impl = KVPolicyCPUImpl(2 * HEADS, DIM, 1.0, HEADS, None, None, kind)
    shape = (BLOCKS, HEADS, SIZE, 2 * DIM)
    caches = list(torch.zeros(LAYERS, *shape, dtype=torch.uint8))
    layers = [layer_of(kind, n, dtype, cache) for n, cache in enumerate(caches)]
    right, wrong = (PagePool(caches, o, float8(kind, dtype)) for o in (True, False))
    for index, layer in enumerate(layers):
        layer.impl = impl
        check_layout(layer, right, index)
        with pytest.raises(RuntimeError, match="layout that this release"):
            check_layout(layer, wrong, index)
        assert not layer.kv_cache.any()
    other = "fp8" if kind == "fp8_e5m2" else "fp8_e5m2"
    with pytest.raises(RuntimeError, match="layout that this release"):
        check_layout(layers[0], PagePool(caches, True, float8(other, dtype)), 0)


# -- query windows ---------------------------------------------------------------------


def engine_of(dtype: torch.dtype, cache_dtype: str) -> SimpleNamespace:
    model = SimpleNamespace(
        dtype=dtype,
        hf_text_config=None,
        model_arch_config=SimpleNamespace(head_size=64),
        get_num_attention_heads=lambda *_: 12,
        use_mla=False,
        get_num_kv_heads=lambda *_: 4,
    )
    cache = SimpleNamespace(cache_dtype=cache_dtype)
    return SimpleNamespace(model_config=model, parallel_config=None, cache_config=cache)


def test_a_query_takes_more_rows_of_smaller_numbers() -> None:
    assert query_rows(engine_of(torch.bfloat16, "auto")) == 3
    assert query_rows(engine_of(torch.bfloat16, "bfloat16")) == 3
    assert query_rows(engine_of(torch.bfloat16, "fp8")) == 6
    assert query_rows(engine_of(torch.float32, "fp8_e5m2")) == 12


@pytest.mark.parametrize("dtype", PLAIN)
def test_queries_stay_unquantised(dtype: torch.dtype) -> None:
    """What a window returns is, bit by bit, what attention was given."""
    group, window = 3, 7
    pool = make_pool("fp8", True, dtype)
    parts = group * dtype.itemsize
    windows = QueryWindows(parts, window, CPU, is_captured=True)
    windows.bind(pool)
    per_block = 2 * SIZE
    blocks = [4, 2, 3][: -(-window * parts // per_block)]
    part = torch.arange(window * parts)
    rows = torch.tensor(blocks)[part // per_block] * per_block + part % per_block
    windows.targets[:] = rows.view(window, parts)
    queries = torch.randn(LAYERS, window, HEADS * group, DIM).to(dtype)
    before = pool.vectors.clone()
    for layer, query in enumerate(queries):
        windows.observe(layer, query, query, query)
    found = windows.queries(rows[None], window)
    assert found.dtype is dtype
    assert torch.equal(found[0].transpose(1, 2), queries)
    lent = torch.zeros(BLOCKS * per_block, dtype=torch.bool)
    lent[rows] = True
    assert torch.equal(pool.vectors[:, ~lent], before[:, ~lent])


def capture_of(name: str, blocks: tuple[int, ...]) -> WindowCapture:
    return WindowCapture(
        request_id=name, first_token=0, num_tokens=1, first_row=0, window_blocks=blocks
    )


@pytest.mark.parametrize("kind", [*KINDS, None])
def test_no_query_is_left_in_a_superblock(kind: str | None) -> None:
    """Its bytes would be NaN to the next request, whose attention reads behind itself.

    Only those of requests that are gone or have had their event; other caches hold
    numbers that are finite.
    """
    whole = torch.randint(1, 100, (LAYERS, BLOCKS, HEADS, SIZE, 2 * DIM)).to(
        torch.uint8 if kind else torch.bfloat16
    )
    before = whole.clone()
    pool = PagePool(list(whole), True, float8(kind, torch.bfloat16) if kind else None)
    windows = QueryWindows(2, 3, CPU)
    windows.bind(pool)
    captures = [capture_of(name, at) for name, at in (("a", (4, 1)), ("b", (2,)))]
    captures.append(capture_of("c", (3,)))
    common = SimpleNamespace(query_start_loc_cpu=torch.tensor([0, 1, 2, 3]))
    windows.plan(Step(common, ("a", "b", "c"), StepCommands((), tuple(captures))))
    windows.end_step()
    windows.drop(["a", "unknown"])
    needs = SimpleNamespace(window_tokens=1)
    events = [SimpleNamespace(request_id="b", window_blocks=(2,))]
    rows = torch.from_numpy(windows.numbers(events, needs)["window_rows"])
    policy = SimpleNamespace(needs=needs)
    read = windows.read(
        SimpleNamespace(policy=policy, events=events, sent={"window_rows": rows})
    )
    assert read["queries"].abs().sum() > 0  # read first
    windows.drop(["a", "b"])
    cleared = [1, 2, 4] if kind else []
    assert not whole[:, cleared].any()
    rest = [block for block in range(BLOCKS) if block not in cleared]
    assert torch.equal(whole[:, rest], before[:, rest])


# -- merges and masks -----------------------------------------------------------------


@kinds
def test_merged_tokens_are_rounded_and_bounded(kind: str) -> None:
    pool = make_pool(kind, True, True)
    pages, limit = pool.keys[1], torch.finfo(KINDS[kind]).max
    before = pages.float().clone()
    slots = torch.tensor([0, 0, 37, 70])
    weight = torch.tensor([1.0, 1.0, 0.25, 0.5])
    others = torch.randn(4, DIM)
    others[3] = 1e9
    scale = torch.tensor([1.0, 1.0, 0.37, 2.0])
    merge_pages(pages, slots, others, weight, scale)
    mixed = before[1, 5] * 0.37 * 0.25 + others[2] * 0.75
    expected = (mixed / 0.37).clamp(-limit, limit).to(KINDS[kind]).float()
    assert torch.equal(pages[1, 5].float(), expected)
    assert torch.equal(pages[2, 6].float(), torch.full((DIM,), limit))
    changed = pages.float().ne(before).any(-1).flatten().nonzero().flatten().tolist()
    assert set(changed) <= {37, 70}


@kinds
def test_masked_attention_reads_stored_numbers(kind: str) -> None:
    """What the same attention gives over a cache of plain numbers."""
    pool = make_pool(kind, True, True)
    keys, values = (view[0].float() / 64 for view in (pool.keys, pool.values))
    for view, plain in ((pool.keys[0], keys), (pool.values[0], values)):
        view.copy_(plain.to(view.dtype))
    query = torch.randn(2, 2, DIM)
    tables = torch.tensor([[3, 8], [5, 1]], dtype=torch.int32)
    lengths = torch.tensor([40, 20], dtype=torch.int32)
    starts = torch.tensor([0, 1, 2], dtype=torch.int32)
    until = torch.full((len(keys), SIZE), 10**6, dtype=torch.int32)
    given = tables, lengths, starts, lengths, until
    found, expected = torch.empty_like(query), torch.empty_like(query)
    until_attention(query, pool.keys[0], pool.values[0], *given, 0.2, found, 1)
    plain = pool.keys[0].float(), pool.values[0].float()
    until_attention(query, *plain, *given, 0.2, expected, 1)
    assert torch.equal(found, expected)
    assert found.abs().sum() > 0
