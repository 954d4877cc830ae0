"""Serving with write gates: what survives is what a plain decoder's keys are gated to.

Gates of random weights, so that about half of the tokens are admitted; gates that are
open or shut say what dense attention and a window of the newest tokens do.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from support.engine.helpers import Engine, Run, make_jobs
from support.engine.oracle_replay import activations, check_replay
from support.engine.reference_decoder import ReferenceDecoder
from support.made_gates import make_gates
from vllm_kvpolicy.policies.admissions.wgkv import Gates, full_name

LAYERS, HEADS, DIM, SIZE, WINDOW, SINKS = 2, 2, 32, 32, 40, 7
BASE = {"interval": 48, "prefill_interval": 128, "recent": WINDOW, "sinks": SINKS}
BUDGET = 110
TIGHT = {"max_num_batched_tokens": 96, "max_model_len": 832, "foresees": False}
BLOCKS = {False: 40, True: 27}  # too few for all at once; with a budget, fewer
LENGTHS = (40, 100, 300, 600, 170)
NEAR = 1e-4


def gates_with_bias(bias: float | None) -> Gates:
    """Gates of the tiny model; with a bias, open or shut for every token."""
    gates = make_gates(LAYERS, HEADS, DIM, 6, window=WINDOW, rope_theta=1e4)
    if bias is None:
        return gates
    shut = {full_name(layer, "conv2.bias") for layer in range(LAYERS)}
    tensors = {
        name: torch.full_like(tensor, bias) if name in shut else tensor
        for name, tensor in gates.tensors.items()
    }
    return replace(gates, tensors=tensors, threshold=0.5)


class Served:
    """A run that strains the engine, and how to recompute it."""

    def __init__(
        self,
        model: Path,
        folder: Path,
        name: str,
        bias: float | None = None,
        threshold: float = 0.5,
    ) -> None:
        self.gates = gates_with_bias(bias)
        self.threshold = threshold
        path = folder / "gates.safetensors"
        self.gates.save(path)
        options = {"wgkv_gates": str(path), "wgkv_threshold": threshold}
        if "snapmax" in name:
            options["snapmax_window"] = WINDOW
        policy = {"policy": name, "policy_config": options, "budget": BUDGET, **BASE}
        jobs = make_jobs(LENGTHS, 150, prompt_logprobs=True)
        with Engine(
            model, policy, folder / "trace", BLOCKS["+" in name], **TIGHT
        ) as engine:
            self.run: Run = engine.run(jobs)
            engine.tell_worker_of_the_last_finish()
            self.counters = engine.counters()
            assert engine.num_free == engine.num_usable, "superblocks are lost"
        self.decoder = ReferenceDecoder(model)

    def by_hand(self, result: Any) -> torch.Tensor:
        """Return [L, H, T] gates of all tokens of a request."""
        keys = activations(self.decoder, result).keys
        half = DIM // 2
        frequency = 1e4 ** (-torch.arange(half, dtype=torch.float64) / half)
        angle = torch.arange(keys.shape[2], dtype=torch.float64)[:, None] * frequency
        cos, sin = angle.cos(), angle.sin()
        first, second = keys.double().split(half, dim=-1)
        before = torch.cat([first * cos + second * sin, second * cos - first * sin], -1)
        found = []
        for layer in range(LAYERS):
            tensors = {
                name.removeprefix(full_name(layer, "")): tensor.double()
                for name, tensor in self.gates.tensors.items()
                if name.startswith(full_name(layer, ""))
            }
            parts = [
                F.rms_norm(
                    part[layer], (DIM,), tensors[f"{side}_key_norm.weight"], 1e-6
                )
                for side, part in (("pre", before), ("post", keys.double()))
            ]
            # As the authors have it: grouped convolutions over [1, H * 2D, T].
            stacked = torch.cat(parts, -1).transpose(1, 2).flatten(0, 1)[None]
            first_weight = tensors["conv1.weight"]
            units = F.conv1d(stacked, first_weight, tensors["conv1.bias"], groups=HEADS)
            logits = F.conv1d(
                F.gelu(units),
                tensors["conv2.weight"],
                tensors["conv2.bias"],
                groups=HEADS,
            )
            found.append(logits[0].sigmoid())
        return torch.stack(found)

    def check_admissions(self, with_budget: bool) -> dict[str, int]:
        """Follow every head through all events; return what was seen."""
        seen = dict.fromkeys(("admitted", "refused", "fillers", "evicted"), 0)
        for result in self.run.results.values():
            gates = self.by_hand(result)
            for layer in range(LAYERS):
                for head in range(HEADS):
                    self._follow(result, gates, layer, head, with_budget, seen)
        return seen

    def _follow(
        self,
        result: Any,
        gates: torch.Tensor,
        layer: int,
        head: int,
        with_budget: bool,
        seen: dict[str, int],
    ) -> None:
        held: list[int] = []
        frontier = 0
        for event in result.events:
            candidates = [*held, *range(frontier, event.frontier)]
            row = event.survivors[layer][head]
            left = [int(token) for token in row if token >= 0]
            assert set(left) <= set(candidates), "a token came back"
            useful, useless = set(), set()
            for token in candidates:
                gate = float(gates[layer, head, token])
                if token < SINKS or gate > self.threshold + NEAR:
                    useful.add(token)
                elif gate < self.threshold - NEAR:
                    useless.add(token)
            assert set(range(min(SINKS, event.frontier))) <= set(left)
            fillers = [token for token in left if token in useless]
            # Whole pages: fillers never make a page of their own.
            assert len(fillers) < SIZE or with_budget
            if not with_budget:
                assert useful <= set(left), "an admitted token was dropped"
            elif fillers:
                missing = useful - set(left)
                assert not missing, "a refused token was preferred to an admitted one"
            seen["admitted"] += len(useful & set(left))
            seen["evicted"] += len(useful - set(left))
            seen["refused"] += len(useless - set(left))
            seen["fillers"] += len(fillers)
            held, frontier = left, event.frontier


@pytest.mark.parametrize(
    "name", ["wgkv", "wgkv+snapkv", "wgkv+ams-tova", "wgkv+trim-snapmax"]
)
def test_survivors_are_those_of_the_gates(
    tiny_model: Path, tmp_path: Path, name: str
) -> None:
    """Under preemption, prompts in chunks and late answers; replayed exactly."""
    served = Served(tiny_model, tmp_path, name)
    has_budget = "+" in name
    seen = served.check_admissions(has_budget)
    assert min(seen["admitted"], seen["refused"]) > 500
    assert (seen["evicted"] > 100) == has_budget
    results = served.run.results.values()
    assert served.run.preemptions > 0
    worst = max(check_replay(served.decoder, result) for result in results)
    print(f"{name}: largest difference {worst:.1e}, {seen}")
    assert served.counters["blocks_returned"] > 0


def test_survivors_do_not_depend_on_chunks(tiny_model: Path, tmp_path: Path) -> None:
    """Of a prompt, which several steps read in parts of other lengths."""
    gates, found = gates_with_bias(None), []
    gates.save(tmp_path / "gates.safetensors")
    options = {"wgkv_gates": str(tmp_path / "gates.safetensors")}
    policy = {"policy": "wgkv", "policy_config": options, **BASE}
    for tokens in (64, 101, 832):
        limits = {"max_num_batched_tokens": tokens, "max_model_len": 832}
        with Engine(tiny_model, policy, tmp_path / str(tokens), **limits) as engine:
            run = engine.run(make_jobs((600, 333), 60))
        found.append(
            {
                name: (
                    result.tokens,
                    [event.survivors.tolist() for event in result.events],
                )
                for name, result in run.results.items()
            }
        )
    assert found[0] == found[1] == found[2]


def test_a_released_file_is_served_like_one_of_ours(
    tiny_model: Path, tmp_path: Path
) -> None:
    """It names neither model nor window: 256 tokens, as in the paper."""
    gates = make_gates(LAYERS, HEADS, DIM, 48, window=256, rope_theta=1e4, sinks=0)
    gates.save(tmp_path / "ours.safetensors")
    parameters = {name: torch.nn.Parameter(t) for name, t in gates.tensors.items()}
    torch.save(parameters, tmp_path / "qwen3-0.16.pt")
    found = []
    for name in ("ours.safetensors", "qwen3-0.16.pt"):
        options = {"wgkv_gates": str(tmp_path / name), "wgkv_threshold": 0.5}
        policy = {"policy": "wgkv", "policy_config": options, "recent": 256, "sinks": 0}
        policy |= {"interval": 64, "prefill_interval": 256}
        trace = tmp_path / f"trace-{name}"
        with Engine(tiny_model, policy, trace, **TIGHT) as engine:
            (result,) = engine.run(make_jobs((700,), 20)).results.values()
            assert engine.counters()["tokens_dropped"] > 0
        found.append([event.survivors.tolist() for event in result.events])
    assert found[0] == found[1] and len(found[0]) > 1


def test_open_gates_are_dense_attention(tiny_model: Path, tmp_path: Path) -> None:
    served = Served(tiny_model, tmp_path, "wgkv", bias=100.0)
    with Engine(tiny_model, num_blocks=BLOCKS[False], **TIGHT) as engine:
        stock = engine.run(make_jobs(LENGTHS, 150))
    assert served.counters["events"] > 20
    assert served.counters["tokens_dropped"] == 0
    for name, result in served.run.results.items():
        assert result.tokens == stock.results[name].tokens


def test_shut_gates_leave_the_window(tiny_model: Path, tmp_path: Path) -> None:
    served = Served(tiny_model, tmp_path, "wgkv", bias=-100.0)
    seen = served.check_admissions(with_budget=False)
    for result in served.run.results.values():
        check_replay(served.decoder, result)
        for event in result.events:
            survivors = torch.tensor(event.survivors)
            # One page, of sinks and fillers.
            assert (survivors >= 0).sum(-1).unique().tolist() == [SIZE]
    assert seen["refused"] > 500
