"""Layers whose heads share latent vectors: pages, windows, and what watches them."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.attention import MLAAttention

from vllm_kvpolicy.policies.base import Needs
from vllm_kvpolicy.protocol import StepCommands, WindowCapture
from vllm_kvpolicy.sizes import query_rows, total_kv_heads
from vllm_kvpolicy.worker.captures.query_windows import QueryWindows
from vllm_kvpolicy.worker.latents import in_latent_space, watch
from vllm_kvpolicy.worker.pages import PagePool
from vllm_kvpolicy.worker.step import Step
from vllm_kvpolicy.worker.transfer import to_device_together

# A latent of 6 channels and 2 rotated ones; a query has 3 heads of 3 + 2, so that it
# takes 4 rows of half a vector and leaves one number of the last.
LAYERS, BLOCKS, SIZE, LATENT, ROTATED = 2, 9, 4, 6, 2
WIDTH, HEADS, OWN, ROWS = LATENT + ROTATED, 3, 3, 4


def made_layers() -> list[Any]:
    """Return what events read of vLLM's layers."""
    sizes = {"num_heads": HEADS, "qk_nope_head_dim": OWN, "qk_rope_head_dim": ROTATED}
    return [
        SimpleNamespace(W_UK_T=torch.randn(HEADS, OWN, LATENT), **sizes)
        for _ in range(LAYERS)
    ]


def test_a_page_is_of_vectors_whose_first_part_is_the_value() -> None:
    whole = torch.randn(LAYERS, BLOCKS, 1, SIZE, WIDTH)
    pool = PagePool(list(whole), keys_are_columns=False, value_dim=LATENT)
    ids = pool.own_pages(torch.tensor([[3, 7]]))
    for layer in range(LAYERS):
        for place, block in enumerate((3, 7)):
            page = ids[0, layer, 0, place]
            stock = whole[layer, block, 0]
            assert torch.equal(pool.keys[layer][page], stock)
            assert torch.equal(pool.values[layer][page], stock[:, :LATENT])
            assert torch.equal(pool.tokens[0][page], stock)
    assert pool.held("values", ids, 2 * SIZE).shape == (1, LAYERS, 1, 2 * SIZE, LATENT)


def test_a_window_is_saved_whole_and_read_in_the_space_of_latents() -> None:
    """Its logits are those of each head's own key, and the rotated one they share."""
    torch.manual_seed(1)
    layers, caches = made_layers(), torch.randn(LAYERS, BLOCKS, 1, SIZE, WIDTH)
    before = caches.clone()
    device = torch.device("cpu")
    windows = QueryWindows(ROWS, 8, device, turn=partial(in_latent_space, layers))
    windows.bind(PagePool(list(caches), keys_are_columns=False, value_dim=LATENT))
    common: Any = SimpleNamespace(query_start_loc_cpu=torch.tensor([0, 2, 5]))
    capture = WindowCapture("b", (5, 2), 1, 0, 2)
    windows.plan(Step(common, ("a", "b"), StepCommands((), (capture,))))
    queries = torch.randn(LAYERS, 5, HEADS, OWN + ROTATED)
    for layer, query in enumerate(queries):
        windows.observe(layer, query, torch.empty(0), torch.empty(0))
    events: Any = [SimpleNamespace(window_blocks=(5, 2), request_id="b")]
    sent = to_device_together(windows.numbers(events, Needs(window_tokens=2)), device)
    read = windows.queries(sent["window_rows"], 2)  # [E, L, Hq, W, D]
    assert read.shape == (1, LAYERS, HEADS, 2, WIDTH)
    vectors = before[:, 7, 0]  # some tokens, [L, N, D]
    for layer in range(LAYERS):
        latent, rotated = vectors[layer].split([LATENT, ROTATED], -1)
        for head in range(HEADS):
            own = latent @ layers[layer].W_UK_T[head].T
            key = torch.cat([own, rotated], -1)
            want = queries[layer, 3:5, head] @ key.T
            got = read[0, layer, head] @ vectors[layer].T
            torch.testing.assert_close(got, want)
    kept = [block for block in range(1, BLOCKS) if block != 5]
    assert torch.equal(caches[:, kept], before[:, kept])  # four rows of eight each


@pytest.mark.parametrize(
    ("heads", "own", "expected"), [(128, 128, 86), (20, 192, 18), (16, 128, 11)]
)
def test_rows_of_a_query_are_half_vectors(heads: int, own: int, expected: int) -> None:
    """DeepSeek-V3, GLM-4.7-Flash and a rank of eight of the former."""
    text = SimpleNamespace(qk_nope_head_dim=own, qk_rope_head_dim=64)
    shape: Any = type("Shape", (), {"head_size": 576, "__getitem__": lambda s, i: s})()
    model = SimpleNamespace(
        use_mla=True,
        hf_text_config=text,
        model_arch_config=shape,
        get_num_attention_heads=lambda parallel, shape: heads,
        get_num_kv_heads=lambda parallel, shape: 1,
    )
    config = SimpleNamespace(model_config=model, parallel_config=None)
    assert query_rows(config) == expected and total_kv_heads(config) == 1


def test_what_watches_a_layer_sees_its_tokens_before_it_attends() -> None:
    seen = []

    class Layer(MLAAttention):
        kv_policy_index = 4

        def __init__(self) -> None:
            torch.nn.Module.__init__(self)

        def forward_impl(self, *given: Any, **named: Any) -> str:
            seen.append(("attends", len(given), named))
            return "output"

    layer = Layer()
    for _ in range(2):  # an engine that makes its KV cache again
        watch(layer, lambda *given: seen.append(given))
    assert layer.forward_impl(1, 2, 3, "cache", output=5) == "output"
    assert seen == [(4, 1, 2, 3), ("attends", 4, {"output": 5})]
