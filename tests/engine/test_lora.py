"""LoRA adapters beside a policy: answers, the prefix cache, too few slots.

Requests without an adapter never share a step with others here: on a CPU vLLM 0.32
adds an adapter to them, too (vLLM's pull request 48421), with or without a policy.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.engine.helpers import Engine, Job, make_prompt, watch_hits

RANK = 4


def write_lora(folder: Path, model: Path, seed: int) -> Path:
    """Write an adapter, as PEFT does, of every projection in a model's layers.

    Args:
        folder: to write into; made if it is not there.
        model: folder of `make_tiny_model`.
        seed: of the weights, which are large enough to change greedy answers at once.
    """
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    weights = load_file(model / "model.safetensors")
    paths = [key for key in weights if key.endswith("_proj.weight")]
    tensors = {}
    for path in paths:
        rows, columns = weights[path].shape
        prefix = f"base_model.model.{path.removesuffix('.weight')}.lora_"
        down = torch.randn(RANK, columns, generator=generator) * columns**-0.5
        tensors[f"{prefix}A.weight"] = down
        tensors[f"{prefix}B.weight"] = torch.randn(rows, RANK, generator=generator)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": RANK // 2,
        "target_modules": sorted({path.split(".")[-2] for path in paths}),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


LENGTHS = (150, 300)
NUM_TOKENS = 60
VALUES: dict[str, Any] = {"budget": 96, "interval": 40, "prefill_interval": 128}
AMS = {"policy": "ams-tova", **VALUES}
IDENTITY = {"policy": "identity", **VALUES}
Answers = dict[str, list[int]]


@pytest.fixture(scope="module")
def adapters(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Return two adapters of the tiny model as vLLM asks for them."""
    from vllm.lora.request import LoRARequest

    folder = tmp_path_factory.mktemp("lora")
    return [
        LoRARequest(name, index, str(write_lora(folder / name, tiny_model, index)))
        for index, name in enumerate("ab", start=1)
    ]


def jobs_of(adapters: list[Any]) -> list[Job]:
    """Return jobs with the same prompts for each adapter, None for the plain model."""
    return [
        Job(
            f"{lora.lora_name if lora else 'plain'}_{length}",
            make_prompt(length, length),
            NUM_TOKENS,
            lora=lora,
        )
        for length in LENGTHS
        for lora in adapters
    ]


def serve(
    model: Path, policy: dict[str, Any] | None, adapters: list[Any], **changes: Any
) -> Engine:
    """Return an engine that has a slot for each adapter."""
    lora = {"enable_lora": True, "max_loras": len(adapters), "max_lora_rank": 8}
    return Engine(model, policy, **{**lora, **changes})


def ask(engine: Engine, adapters: list[Any]) -> Answers:
    """Ask the plain model, then all adapters at once."""
    found: Answers = {}
    for group in ([None], adapters):
        found |= engine.run(jobs_of(group)).tokens
    return found


@pytest.fixture(scope="module")
def stock(tiny_model: Path, adapters: list[Any]) -> Answers:
    """Return the answers without a policy and without the prefix cache."""
    with serve(tiny_model, None, adapters) as engine:
        found = ask(engine, adapters)
    assert len(set(map(tuple, found.values()))) == 3 * len(LENGTHS)
    return found


@pytest.mark.parametrize("policy", [IDENTITY, AMS], ids=["identity", "ams"])
def test_answers_are_those_without_the_cache(
    tiny_model: Path, adapters: list[Any], stock: Answers, policy: dict[str, Any]
) -> None:
    """Survivors are each adapter's own: those of other keys would answer otherwise."""
    with serve(tiny_model, policy, adapters, enable_prefix_caching=True) as engine:
        hits = watch_hits(engine)
        cold = ask(engine, adapters)
        assert not any(hits.values()), "the same prompt under another adapter"
        assert ask(engine, adapters) == cold
        assert all(hits[f"{name}_300"] >= 64 for name in ("plain", "a", "b"))
        assert engine.counters()["events"] >= 30
    for name, tokens in stock.items():
        assert (cold[name] == tokens) is (policy is IDENTITY)


def test_who_sits_a_step_out_keeps_its_slot(
    tiny_model: Path, adapters: list[Any], tmp_path: Path
) -> None:
    """vLLM counts the adapters of a step, in which one event of two is carried out."""
    from vllm.lora.request import LoRARequest

    third = LoRARequest("c", 3, str(write_lora(tmp_path / "c", tiny_model, 3)))
    policy = {**IDENTITY, "events": "always", "events_per_step": 1}
    with serve(tiny_model, policy, adapters) as engine:
        run = engine.run([jobs_of([each])[0] for each in (*adapters, third)])
        assert {len(tokens) for tokens in run.tokens.values()} == {NUM_TOKENS}


def test_nobody_is_cut_for_one_without_a_slot(
    tiny_model: Path, adapters: list[Any]
) -> None:
    """Two that have room run; of the other adapter one waits until they end."""
    policy = {**AMS, "interval": 64, "events": "pressure"}
    changes = {"max_loras": 1, "num_blocks": 24, "max_model_len": 416}
    first, second = adapters
    with serve(tiny_model, policy, adapters, **changes) as engine:
        jobs = [
            Job(str(number), make_prompt(number, length), 100, lora=lora)
            for number, (length, lora) in enumerate(
                ((250, first), (250, first), (300, second))
            )
        ]
        engine.run(jobs)
        assert engine.counters()["events"] == 0


def test_adapters_take_turns_in_one_slot(
    tiny_model: Path, adapters: list[Any], stock: Answers
) -> None:
    """vLLM passes over requests whose adapter has no slot; the pool is scarce, too."""
    changes = {"max_loras": 1, "num_blocks": 15, "max_model_len": 416}
    changes |= {"foresees": False}
    with serve(tiny_model, IDENTITY, adapters, **changes) as engine:
        run = engine.run(jobs_of(adapters))
        assert run.preemptions > 0
        assert run.tokens == {name: stock[name] for name in run.tokens}
