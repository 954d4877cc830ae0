"""Rollouts of reinforcement learning: new weights, and memory that is given away.

On a CPU vLLM neither transfers weights nor sleeps. Here a file stands in for the
trainer, and what a GPU's memory would lose, the KV cache and weights, is overwritten.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from support.engine.helpers import OWN, Engine, Run, jobs_of, serve
from support.sweeps import some
from support.tiny_model import make_tiny_model

LENGTHS = (40, 150, 300)
VALUES: dict[str, Any] = {"budget": 96, "interval": 40, "prefill_interval": 128}
# `epikv` has modules of its own in the model's layers.
SERVER = {"policy": "ams-tova", "allow": ["epikv"], "pin": "none", **VALUES}
IDENTITY = {"policy": "identity", **VALUES}
NAMES = ("ams-tova", "epikv", "none")
RUBBISH = 3.0  # not NaN, which stock kernels read behind the last token, too


def check_identity(run: Run, expected: Run) -> None:
    """The server's own policy, `identity`, gives what `none` gives elsewhere."""
    for length in LENGTHS:
        assert run.tokens[f"{OWN} {length}"] == expected.tokens[f"none {length}"]


# -- new weights ----------------------------------------------------------------------


@dataclass
class Nothing:
    """What this transfer is set up with."""


@dataclass
class Weights:
    """One update."""

    path: str


class FromFile(WeightTransferEngine[Nothing, Weights]):
    """Loads as vLLM's transfers between GPUs do, layer by layer, but from a file."""

    init_info_cls = Nothing
    update_info_cls = Weights

    def init_transfer_engine(self, init_info: Nothing) -> None: ...

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: Weights) -> None:
        self.model.load_weights(load_file(update_info.path).items())

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None: ...


def update(engine: Engine, model: Path) -> None:
    """Give an engine the weights of another model, as a trainer does."""
    told = {"update_info": {"path": str(model / "model.safetensors")}}
    engine.core.pause_scheduler("keep")
    engine.llm.collective_rpc("start_weight_update")
    engine.llm.collective_rpc("update_weights", kwargs=told)
    engine.llm.collective_rpc("finish_weight_update")
    engine.core.resume_scheduler()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the tiny model with other weights."""
    return make_tiny_model(tmp_path_factory.mktemp("trained"), seed=1)


def test_new_weights_answer_as_if_they_had_been_loaded(
    tiny_model: Path, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of the old weights is left: keys, survivors, credit, hidden states."""
    registry = WeightTransferEngineFactory._registry
    monkeypatch.setitem(registry, "file", lambda: FromFile)
    changes: dict[str, Any] = {"enable_prefix_caching": True}
    changes["weight_transfer_config"] = WeightTransferConfig(backend="file")
    jobs, own = jobs_of(NAMES, LENGTHS, 100), jobs_of([OWN], LENGTHS, 100)
    expected = serve(trained, SERVER, jobs)
    with Engine(tiny_model, SERVER, **changes) as engine:
        first = engine.run(jobs)
        update(engine, trained)
        assert engine.run(jobs).tokens == expected.tokens
        update(engine, tiny_model)
        last = engine.run(jobs)
    assert last.tokens == first.tokens and last.counters["events"] >= 60
    assert all(first.tokens[name] != expected.tokens[name] for name in first.tokens)
    with Engine(tiny_model, IDENTITY, **changes) as engine:
        check_identity(engine.run(own), first)
        update(engine, trained)
        last = engine.run(own)
    check_identity(last, expected)
    assert last.counters["events"] >= 20


# -- sleep ----------------------------------------------------------------------------


def sleep_and_wake(engine: Engine, level: int, mode: str) -> None:
    """Give memory away and take it back, with rubbish in it."""
    lost = list(engine.worker.model_runner.kv_caches)
    if level == 2:
        lost += [each.data for each in engine.worker.get_model().parameters()]
    engine.llm.sleep(level, mode)
    assert engine.core.is_sleeping() and engine.num_free == engine.num_usable
    for tensor in lost:
        tensor.fill_(RUBBISH)
    engine.llm.wake_up()
    if level == 2:
        engine.llm.collective_rpc("reload_weights")


@pytest.fixture(scope="module")
def awake(tiny_model: Path) -> Run:
    """Return what an engine answers that never sleeps."""
    return serve(tiny_model, SERVER, jobs_of(NAMES, LENGTHS, 100))


@pytest.mark.parametrize("level", some([2, 1]))
def test_an_engine_that_slept_answers_as_before(
    tiny_model: Path, awake: Run, level: int
) -> None:
    """Prompts that were cached are computed again."""
    jobs = jobs_of(NAMES, LENGTHS, 100)
    with Engine(tiny_model, SERVER, enable_prefix_caching=True) as engine:
        before = engine.run(jobs)
        sleep_and_wake(engine, level, "abort")
        after = engine.run(jobs)
    assert before.tokens == after.tokens == awake.tokens
    num_events = before.counters["events"]
    assert num_events >= 20 and after.counters["events"] >= 2 * num_events


@pytest.mark.parametrize("level", some([1, 2]))
def test_requests_that_slept_go_on(tiny_model: Path, awake: Run, level: int) -> None:
    """They are computed anew, events included."""
    with Engine(tiny_model, IDENTITY, enable_prefix_caching=True) as engine:
        num_steps = 0

        def on_step(engine: Engine) -> None:
            nonlocal num_steps
            num_steps += 1
            if num_steps in (30, 31, 70):
                sleep_and_wake(engine, level, "keep")

        run = engine.run(jobs_of([OWN], LENGTHS, 100), on_step)
    check_identity(run, awake)
    assert run.preemptions == 3 * len(LENGTHS) and run.counters["events"] >= 10
