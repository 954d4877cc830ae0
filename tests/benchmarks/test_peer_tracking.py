"""Tests of what is noted of a press' events, and of the peer's loop; no kvpress."""

from types import SimpleNamespace

import torch

from benchmarks.accuracy.cost import full_cost
from benchmarks.peer.decoding import answer
from benchmarks.peer.tracking import Tracker, Watching, WatchingMask


class FakePress:
    """Keeps the `count` best of given scores, in the order of topk, as kvpress does."""

    count = 4
    is_honest = True

    def score(self, keys):
        return keys[..., 0]

    def compress(self, module, hidden_states, keys, values, attentions, kwargs):
        if keys.shape[2] <= self.count:
            return keys, values
        indices = self.score(keys).topk(self.count, dim=-1).indices
        indices = indices if self.is_honest else indices.flip(-1)
        wide = indices.unsqueeze(-1).expand(-1, -1, -1, 2)
        return keys.gather(2, wide), values.gather(2, wide)


def watched(in_order, **more):
    """Return a fake press and its tracker."""
    facts = {"tracker": Tracker(), "in_order": in_order, **more}
    press = type("Watched", (Watching, FakePress), facts)()
    return press, press.tracker


def states(scores):
    """Return keys and values [1, H, T, 2] with given scores [H, T]."""
    keys = torch.tensor(scores, dtype=torch.float32)[None, ..., None].repeat(1, 1, 1, 2)
    return keys, keys + 100


LAYER = SimpleNamespace(layer_idx=0)


def test_sorting_keeps_the_same_tokens_in_the_order_of_the_cache():
    keys, values = states([[5, 1, 9, 7, 2, 8], [1, 2, 3, 4, 5, 6]])
    shipped, _ = watched(False)
    as_is = shipped.compress(LAYER, None, keys, values, None, {})
    assert as_is[0][0, ..., 0].tolist() == [[9, 8, 7, 5], [6, 5, 4, 3]]
    in_order, _ = watched(True)
    kept = in_order.compress(LAYER, None, keys, values, None, {})
    assert kept[0][0, ..., 0].tolist() == [[5, 9, 7, 8], [3, 4, 5, 6]]
    assert torch.equal(kept[1], kept[0] + 100)


def test_positions_are_followed_through_the_events_of_each_layer():
    tracker = Tracker()
    tracker.keep(0, 8, torch.tensor([[0, 1, 2, 3, 4], [4, 5, 6, 7, 0]]))
    tracker.keep(1, 8, torch.tensor([[3, 4, 5, 6, 7], [3, 4, 5, 6, 7]]))
    assert tracker.figures()["sinks_held"] == [round((4 + 1 + 1 + 1) / 16, 4)]
    # Positions 8 to 10 are new, at the places 5 to 7.
    tracker.keep(0, 8, torch.tensor([[7, 3, 0], [6, 4, 1]]))
    assert tracker._held[0].tolist() == [[10, 3, 0], [9, 0, 5]]


def test_masked_keys_that_are_chosen_again_are_counted():
    class Masks:
        compression_ratio = 0.5

        def compress(self, module, hidden_states, keys, values, *rest):
            return keys, values

    press = type("Watched", (WatchingMask, Masks), {"tracker": Tracker()})()
    keys, values = states([[0] * 6] * 2)
    heads, places = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 4, 5])
    layer = SimpleNamespace(layer_idx=0, masked_key_indices=(0 * heads, heads, places))
    press.compress(layer, None, keys, values)
    assert press.tracker.figures()["sinks_held"] == [(2 / 4 + 4 / 4) / 2]
    keys, values = states([[0] * 8] * 2)
    heads, places = torch.tensor([0] * 4 + [1] * 4), torch.arange(8) % 4 + 2
    layer.masked_key_indices = (0 * heads, heads, places)
    press.compress(layer, None, keys, values)
    # Of the 8 kept keys, 0 and 1 of the first head were masked before. They are no
    # sinks any more; of the second head 0 and 1 still are.
    figures = press.tracker.figures()
    assert (figures["events"], figures["revived"]) == (2, 2 / 8)
    assert figures["sinks_held"][1] == (0 / 4 + 2 / 4) / 2
    assert figures["kept_mean"] == 4
    assert Tracker().figures()["kept_mean"] is None


def test_the_loop_is_greedy_decoding_and_counts_as_the_harness(tiny_model):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    prompt = [5, 9, 23, 40, 11, 60, 7]
    whole = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)
    expected = whole[0, len(prompt) :].tolist()
    found = answer(model, None, prompt, 2, 12)
    assert found["tokens"] == expected and not found["stopped"]
    assert (found["kv_read"], found["kv_peak"]) == full_cost(len(prompt), 12, 1)
    model.generation_config.eos_token_id = [expected[5]]
    found = answer(model, None, prompt, 2, 12)
    first = expected.index(expected[5])
    assert found["tokens"] == expected[: first + 1] and found["stopped"]
