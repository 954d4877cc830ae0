"""Signals end up at their positions, however the tokens were cut into steps."""

import random
from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from support.worker.loaded_model import loaded_model
from vllm_kvpolicy.policies.hooks import decoder_layers
from vllm_kvpolicy.policies.scorers._signals import TokenSignal, signals_from_hidden
from vllm_kvpolicy.protocol import NO_COMMANDS
from vllm_kvpolicy.worker.captures.token_signals import TokenSignals
from vllm_kvpolicy.worker.step import Step

LAYERS, SIZE, SLOTS, STEP_TOKENS, MAX_LEN = 4, 8, 5, 128, 100
HIDDEN = (TokenSignal("hidden", 1, 1), TokenSignal("hidden", Fraction(1, 2), 3))
SIGNALS = (*HIDDEN, TokenSignal("key"), TokenSignal("value"))


class Layer(nn.Module):
    """A decoder layer that looks at its own token alone."""

    def __init__(self, has_residual: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)
        self.has_residual = has_residual

    def forward(self, hidden, residual):
        residual = hidden if residual is None else hidden + residual
        hidden = torch.tanh(self.linear(residual))
        return (hidden, residual) if self.has_residual else hidden + residual


class Model(nn.Module):
    """Embeds numbers and runs them through layers; keeps each layer's output."""

    def __init__(self, has_residual: bool = True) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.layers = nn.ModuleList(Layer(has_residual) for _ in range(LAYERS))
        self.embedding = nn.Embedding(200, SIZE)

    def forward(self, tokens):
        hidden, residual, outputs = self.embedding(tokens), None, []
        for layer in self.model.layers:
            result = layer(hidden, residual)
            hidden, residual = result if isinstance(result, tuple) else (result, None)
            outputs.append(hidden if residual is None else hidden + residual)
        return torch.stack(outputs)


def vectors(tokens: torch.Tensor, kind: str, layer: int) -> torch.Tensor:
    """Keys or values [T, 2, 16] of a layer, functions of the tokens alone."""
    phase = torch.arange(32).view(2, 16) * (1.5 if kind == "key" else 2.5)
    return torch.sin(tokens[:, None, None] + phase + layer)


class Run:
    """Computes sequences in steps, as an engine would."""

    def __init__(self, model: nn.Module, forward=None) -> None:
        sizes = loaded_model(LAYERS, SLOTS, MAX_LEN, STEP_TOKENS, SIZE)
        self.signals = TokenSignals(SIGNALS, sizes)
        self.signals.attach(model)
        self.forward = model if forward is None else forward
        self.computed: dict[str, int] = {}

    @torch.no_grad()
    def step(self, sequences: dict[str, list[int]], chunks: dict[str, int]) -> None:
        """Compute `chunks` more tokens; the batch ends with a row of padding."""
        tokens, start, lengths = [], [0], []
        for name, size in chunks.items():
            done = self.computed.get(name, 0)
            tokens += sequences[name][done : done + size]
            self.computed[name] = done + size
            start.append(len(tokens))
            lengths.append(done + size)
        batch = torch.tensor([*tokens, 199, 199])
        metadata = SimpleNamespace(
            num_reqs=len(chunks) + 1,
            num_actual_tokens=len(batch),
            query_start_loc=torch.tensor([*start, len(tokens)], dtype=torch.int32),
            seq_lens=torch.tensor([*lengths, 0], dtype=torch.int32),
        )
        self.signals.plan(Step(metadata, list(chunks), NO_COMMANDS))
        self.forward(batch)
        for layer in range(LAYERS):
            states = (vectors(batch, kind, layer) for kind in ("key", "value"))
            self.signals.observe(layer, torch.empty(0), *states)
        self.signals.end_step()

    def drop(self, name: str) -> None:
        del self.computed[name]
        self.signals.drop([name])


def expected(model: nn.Module, tokens: list[int]) -> dict[TokenSignal, torch.Tensor]:
    """Signals [T] of a sequence that is computed at once."""
    sequence = torch.tensor(tokens)
    with torch.no_grad():
        rows = signals_from_hidden(HIDDEN, model(sequence))
    for signal in SIGNALS[2:]:
        layers = [vectors(sequence, signal.kind, layer) for layer in range(LAYERS)]
        rows[signal] = torch.stack(layers).var(-1).mean((0, 2))[None]
    return {signal: row[0] for signal, row in rows.items()}


def check(run: Run, model: nn.Module, sequences: dict[str, list[int]]) -> None:
    """Compare what the table holds of all live requests; calls assert."""
    names = list(run.computed)
    rows = torch.from_numpy(run.signals._rows.take_all(names, len(names)))
    read = run.signals.values(rows, MAX_LEN)
    assert set(read) == set(SIGNALS)
    for row, name in enumerate(names):
        size = run.computed[name]
        for signal, want in expected(model, sequences[name][:size]).items():
            torch.testing.assert_close(
                read[signal][row, :size], want, rtol=1e-5, atol=1e-6
            )


@pytest.mark.parametrize("has_residual", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_any_chunks_and_neighbours(seed: int, has_residual: bool) -> None:
    torch.manual_seed(seed)
    rng, model = random.Random(seed), Model(has_residual)
    run = Run(model)
    sequences = {
        name: [rng.randrange(199) for _ in range(rng.randint(40, MAX_LEN))]
        for name in "abcdef"
    }
    for count in range(60):
        live = [n for n in run.computed if run.computed[n] < len(sequences[n])]
        new = [n for n in sequences if n not in run.computed]
        if new and len(run.computed) < SLOTS:
            live.append(rng.choice(new))
        batch = rng.sample(live, rng.randint(1, len(live))) if live else []
        chunks = {}
        for name in batch:
            left = len(sequences[name]) - run.computed.get(name, 0)
            chunks[name] = min(left, rng.choice([1, 1, 2, 11]))
        if chunks:
            run.step(sequences, chunks)
        if count % 7 == 6 and run.computed:
            check(run, model, sequences)
            run.drop(rng.choice(list(run.computed)))  # comes back: a preemption
    check(run, model, sequences)
    assert max(run.computed.values()) > 20


@torch._dynamo.config.patch(enable_aot_compile=True)
def test_compiled_code_measures_too(tmp_path) -> None:
    """vLLM keeps compiled code on disk; buffers must be those of the new process."""
    torch.manual_seed(0)
    model, path = Model(), tmp_path / "compiled"
    Run(model)
    tokens = torch.arange(20)
    torch._dynamo.mark_dynamic(tokens, 0)
    compiled = torch.compile(Model.forward, fullgraph=True, backend="inductor")
    with torch.no_grad():
        compiled.aot_compile(((model, tokens), {})).save_compiled_function(str(path))
    with path.open("rb") as file:
        loaded = torch.compiler.load_compiled_function(
            file, f_globals=Model.forward.__globals__
        )
    loaded.disable_guard_check()
    other = Model()
    run = Run(other, lambda tokens: loaded(other, tokens))
    sequences = {"a": list(range(40)), "b": list(range(90, 130))}
    for _ in range(4):
        run.step(sequences, {"a": 10, "b": 5})
    check(run, other, sequences)


def test_a_forward_pass_without_a_plan_changes_nothing() -> None:
    """vLLM's own warm-up runs have no plan; neither has a step that was collected."""
    model = Model()
    run = Run(model)
    sequences = {"a": list(range(30))}
    run.step(sequences, {"a": 9})
    with torch.no_grad():
        model(torch.full((STEP_TOKENS,), 77))
    run.signals.end_step()
    run.step(sequences, {"a": 9})
    check(run, model, sequences)


def test_models_without_one_list_of_layers_are_refused() -> None:
    model = Model()
    assert decoder_layers(model, LAYERS) is model.model.layers
    with pytest.raises(ValueError, match="5 decoder layers, found 0"):
        decoder_layers(model, 5)
    model.twin = nn.Module()
    model.twin.layers = nn.ModuleList(Layer(True) for _ in range(LAYERS))
    with pytest.raises(ValueError, match="found 2"):
        decoder_layers(model, LAYERS)


def test_layers_by_depth() -> None:
    band = TokenSignal("hidden", Fraction(7, 32), Fraction(13, 32))
    assert band.layers(32) == range(7, 14)
    assert band.layers(28) == range(6, 12)
    assert band.layers(2) == range(0, 1)
    assert TokenSignal("key").layers(3) == range(3)
    for first, last in ((0, 4), (2, 1), (-1, 2)):
        with pytest.raises(ValueError, match="0 <= first <= last <= 3"):
            TokenSignal("hidden", first, last).layers(4)
