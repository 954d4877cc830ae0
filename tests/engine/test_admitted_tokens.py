"""Admissions in engines: what survives, and what queries see, follows from decisions.

A plain decoder decides about every token; files are of random weights, so that about
half of the tokens are admitted. Decisions next to a threshold may go either way and are
left out. Servers offer several policies at once, under strain: prompts in chunks, late
answers, a pool too small for all requests. With `exact` attention the decoder hides
tokens by its own decisions; nothing that the server recorded goes into it, but for
evictions behind an admission.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from support import sweeps
from support.engine.admissions import Decisions, closed_form, follow_all
from support.engine.dms_decoder import DmsDecoder, dropped, say_dms
from support.engine.gated_decoder import GatedDecoder
from support.engine.helpers import BLOCK, OWN, Result, jobs_of, serve
from support.engine.kvzap_decoder import KVzapDecoder
from support.engine.oracle_quest import QuestDecoder
from support.engine.oracle_replay import check_replay, visibility
from support.engine.reference_decoder import ReferenceDecoder
from support.made_gates import make_gates
from support.made_patterns import write_pattern
from support.made_surrogates import CENTRE, write_surrogate
from support.tiny_model import make_tiny_model
from vllm_kvpolicy.config_keys import ALWAYS, PRESSURE
from vllm_kvpolicy.policies.admissions.wgkv import Gates

LAYERS, HEADS, DIM, HIDDEN, WINDOW, SINKS = 2, 2, 32, 64, 40, 7
BASE = {"interval": 48, "prefill_interval": 128, "recent": WINDOW, "sinks": SINKS}
BUDGET, QUEST_BUDGET = 110, 150
TIGHT = {"max_num_batched_tokens": 96, "max_model_len": 640, "foresees": False}
ROOMY = {"max_num_batched_tokens": 640, "num_blocks": 400}
LENGTHS, NUM_TOKENS = (1, 170, 300), 80
USE = [[0.9, 0.1], [0.2, 0.7]]  # of heads, by layer: duo keeps the text of two
# Names that a server offers, further options, and superblocks.
SERVERS: dict[str, tuple[tuple[str, ...], dict[str, Any], int]] = {
    "files": (
        ("wgkv", "wgkv+trim-snapmax", "kvzap", "kvzap+snapkv", "duo", "local"),
        {},
        90,
    ),
    "borrowed": (("dms", "dms+ams-tova"), {}, 25),
    "exact": (
        ("wgkv", "wgkv+snapkv", "wgkv+quest"),
        {"exact": True, "quest_budget": QUEST_BUDGET},
        40,
    ),
    # A server has at most one word that decides in the forward pass.
    "exact-scored": (("kvzap", "kvzap+snapkv"), {"exact": True}, 25),
    "exact-borrowed": (
        ("dms", "dms+snapkv", "dms+quest", "duo", "none"),
        {"exact": True, "quest_budget": 2000, "duo_sparsity": 0},
        60,
    ),
    # Events of those with an eviction are called for, beside others without a bound.
    "called": (("dms+ams-tova", "dms+snapkv", "dms"), {}, 30),
}
CALLED = {"called": {"events": PRESSURE, "foresees": True}}
LEAST_DROPPED = {"called": 200}  # no more than what has to be
NOT_CUT = "called", "dms+snapkv"  # the other one with a floor is longer
if sweeps.every_name:
    more = ("wgkv+snapkv", "wgkv+ams-tova", "kvzap+ams-tova", "dms", "dms+snapkv")
    SERVERS["more-files"] = (more[:3], {}, 40)
    SERVERS["more-borrowed"] = (more[3:], {}, 25)
CASES = [(server, name) for server, (names, *_) in SERVERS.items() for name in names]
EXACT = [case for case in CASES if "exact" in SERVERS[case[0]][1]]
DECIDED = [case for case in CASES if case not in EXACT]


class ExactDmsDecoder(DmsDecoder):
    """Sees what its own decisions leave."""

    def _attention(self, layer: int, hidden: torch.Tensor, visible: torch.Tensor):
        before = len(self.rows)
        super()._attention(layer, hidden, visible)  # for the decisions alone
        logits = self.rows[before] * self.scale_by - self.offset
        del self.rows[before:]
        visible = visible & closed_form(~dropped(logits, 1), WINDOW + 1, SINKS)
        return super()._attention(layer, hidden, visible)


class GatedQuestDecoder(GatedDecoder, QuestDecoder):
    """Reads some pages of what its own gates keep."""

    def __init__(self, folder: Path, gates: Gates, hides: bool) -> None:
        QuestDecoder.__init__(self, folder, QUEST_BUDGET, BLOCK)
        self.gates, self.hides, self.threshold = gates, hides, 0.5


class Words:
    """What admissions are given, and plain decoders that decide as they should.

    Args:
        plain: folder of a model.
        borrowing: one whose queries lend DMS a channel.
        folder: to write files into.
        bias: of gates, None for some above and some below the threshold.
    """

    def __init__(
        self, plain: Path, borrowing: Path, folder: Path, bias: float | None = None
    ) -> None:
        self.plain, self.borrowing = plain, borrowing
        sizes = {"window": WINDOW, "sinks": SINKS, "rope_theta": 1e4}
        self.gates = make_gates(LAYERS, HEADS, DIM, 6, **sizes)
        for layer in range(LAYERS if bias is not None else 0):
            self.gates.tensors[Gates.full_name(layer, "conv2.bias")].fill_(bias)
        folder.mkdir(exist_ok=True)
        self.gates.save(folder / "gates.safetensors")
        # A linear surrogate goes with open and shut gates.
        units = 16 if bias is None else None
        surrogate = write_surrogate(folder / "surrogate", LAYERS, HEADS, HIDDEN, units)
        self.tensors = load_file(surrogate / "model.safetensors")
        self.options = {
            "wgkv_gates": str(folder / "gates.safetensors"),
            "wgkv_threshold": 0.5,
            "kvzap_model": str(surrogate),
            "duo_pattern": str(write_pattern(folder / "duo", USE, SINKS, WINDOW)),
            "snapmax_window": WINDOW,
        }

    def decoder(self, name: str, hides: bool = False) -> Any:
        """Return the decoder of a policy; one that hides does so by the closed form."""
        if "wgkv" in name:
            kind = GatedQuestDecoder if "quest" in name else GatedDecoder
            return kind(self.plain, self.gates, hides)
        if "kvzap" in name:
            rule = {"threshold": CENTRE, "recent": WINDOW, "sinks": SINKS}
            return KVzapDecoder(self.plain, self.tensors, hides, **rule)
        if "dms" in name:
            return (ExactDmsDecoder if hides else DmsDecoder)(self.borrowing)
        return ReferenceDecoder(self.plain)

    def decisions(self, name: str, decoder: Any, result: Result) -> Decisions:
        """Return what a policy drops, and what may go either way, [L, H, T] bool."""
        if isinstance(decoder, DmsDecoder | GatedDecoder | KVzapDecoder):
            return decoder.decisions()
        keeps = torch.tensor(USE) > (0.5 if name == "duo" else 1)
        is_dropped = ~keeps[..., None].expand(-1, -1, len(result.all_tokens))
        return is_dropped, torch.zeros_like(is_dropped)


class Served:
    """A run of a server; all names answer the same prompts."""

    def __init__(
        self,
        words: Words,
        trace: Path,
        names: tuple[str, ...],
        options: dict[str, Any],
        num_blocks: int = 400,
        events: str = ALWAYS,
        **changes: Any,
    ) -> None:
        starts = tuple({name.partition("+")[0] for name in names}) + ("snapmax",)
        own = {k: v for k, v in words.options.items() if k.startswith(starts)}
        if "wgkv+trim-snapmax" not in names:
            own.pop("snapmax_window")
        values = {"policy": names[0], "allow": [n for n in names[1:] if n != "none"]}
        values |= {"policy_config": {**own, **options}, "budget": BUDGET, **BASE}
        values["events"] = events
        jobs = jobs_of(names, LENGTHS, NUM_TOKENS, prompt_logprobs=True)
        model = words.borrowing if "dms" in names[0] else words.plain
        limits = {"num_blocks": num_blocks, "max_num_seqs": 32, **TIGHT, **changes}
        self.run = serve(model, values, jobs, trace, **limits)

    def results(self, name: str) -> list[Result]:
        """Return what a policy gave, shortest prompt first."""
        return [self.run.results[f"{name} {length}"] for length in LENGTHS]

    def tokens(self, name: str) -> list[list[int]]:
        """Return a policy's answers."""
        return [result.tokens for result in self.results(name)]


@pytest.fixture(scope="module")
def borrowing_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_tiny_model(tmp_path_factory.mktemp("dms"))
    say_dms(folder, dms_window_size=WINDOW, dms_cr=2)
    return folder


@pytest.fixture(scope="module")
def words(tiny_model: Path, borrowing_model: Path, tmp_path_factory) -> Words:
    return Words(tiny_model, borrowing_model, tmp_path_factory.mktemp("files"))


@pytest.fixture(scope="module")
def served(words: Words, tmp_path_factory) -> Callable[[str], Served]:
    """Return what runs a server, once."""

    @cache
    def run(server: str) -> Served:
        trace, changes = tmp_path_factory.mktemp("trace"), CALLED.get(server, {})
        return Served(words, trace, *SERVERS[server], **changes)

    return run


@pytest.mark.parametrize(("server", "name"), DECIDED)
def test_survivors_are_those_of_the_decisions(
    words: Words, served, server: str, name: str
) -> None:
    """And answers follow from them."""
    has_budget, decoder = "+" in name, words.decoder(name)
    total = follow_all(
        served(server).results(name),
        lambda _: decoder,
        SINKS,
        has_budget,
        partial(words.decisions, name),
    )
    assert total["dropped"] > LEAST_DROPPED.get(server, 500)
    assert (total["kept"] > 300) == (name != "local")
    is_cut = has_budget and (server, name) != NOT_CUT
    assert (total["evicted"] > 100) == is_cut


@pytest.mark.parametrize("server", SERVERS)
def test_servers_are_under_strain(served, server: str) -> None:
    assert served(server).run.preemptions > 0 or server in CALLED
    assert served(server).run.counters["blocks_returned"] > 0
    least = LEAST_DROPPED.get(server, 500)
    assert served(server).run.counters["tokens_dropped"] > least


@pytest.mark.parametrize("server", ["files", "borrowed"])
@pytest.mark.parametrize(
    "changes", [{}, pytest.param({"enforce_eager": False}, marks=pytest.mark.slow)]
)
def test_survivors_do_not_depend_on_chunks(
    words: Words, served, tmp_path: Path, server: str, changes: dict[str, Any]
) -> None:
    """Nor on preemption; the decision on a chunk's last token may come later.

    Hooks are traced into a compiled graph.
    """
    names, options, _ = SERVERS[server]
    whole = Served(words, tmp_path, names, options, **{**ROOMY, **changes})
    assert whole.run.preemptions == 0
    whole.run.check_kept(served(server).run)


@pytest.mark.parametrize(("server", "name"), EXACT)
def test_exact_attention_is_its_closed_form(
    words: Words, served, server: str, name: str
) -> None:
    """Tokens are hidden as soon as they leave the window, in every layer.

    A request without such decisions sees all that it holds, here everything.
    """
    has_budget = "+snapkv" in name
    decoder = words.decoder(name, hides=True)
    for result in served(server).results(name):
        if name in ("duo", "none"):
            assert bool(result.events) == (name == "duo" and len(result.job.prompt) > 1)
            check_replay(DmsDecoder(words.borrowing), result)
        elif name == "wgkv+quest":
            decoder.check(result)
        elif has_budget:
            assert not visibility(decoder, result).all()
            check_replay(decoder, result)
        else:
            check_replay(decoder, replace(result, passes=[]))
    if name == "wgkv+quest":
        assert decoder.choices > 300 and decoder.closest > 1e-4


def test_what_admits_everything_is_stock(
    tiny_model: Path, borrowing_model: Path, tmp_path: Path
) -> None:
    words = Words(tiny_model, borrowing_model, tmp_path / "open", bias=100.0)
    names = ("wgkv", "kvzap", "duo")
    options = {"kvzap_threshold": -1e6, "duo_sparsity": 0}
    found = Served(words, tmp_path / "trace", names, options, 60)
    assert (
        found.run.counters["events"] > 20 and found.run.counters["tokens_dropped"] == 0
    )
    jobs = jobs_of([OWN], LENGTHS, NUM_TOKENS)
    stock = list(serve(tiny_model, None, jobs, **TIGHT).tokens.values())
    assert [found.tokens(name) for name in names] == [stock] * len(names)


def test_what_admits_nothing_leaves_the_window(
    tiny_model: Path, borrowing_model: Path, tmp_path: Path
) -> None:
    """And in every head one page, of sinks and fillers."""
    words = Words(tiny_model, borrowing_model, tmp_path / "shut", bias=-100.0)
    names = ("wgkv", "kvzap", "duo", "local")
    options = {"kvzap_threshold": 1e6, "duo_sparsity": 1}
    found = Served(words, tmp_path / "trace", names, options, 40)
    for name, result in found.run.results.items():
        check_replay(words.decoder(name), result)
        for event in result.events:
            kept = (torch.tensor(event.survivors) >= 0).sum(-1)
            assert kept.unique().tolist() == [BLOCK]
            rows = event.survivors.reshape(LAYERS * HEADS, -1)
            assert all(set(range(SINKS)) <= set(row) for row in rows)
    assert found.tokens("duo") == found.tokens("local")
