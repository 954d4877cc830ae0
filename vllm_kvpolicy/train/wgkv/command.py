"""`vllm-kvpolicy train wgkv`: trains the write gates of a model.

The model is not changed. Its gates learn which tokens outside the window the model can
do without. Each sparsity weight gives one file of gates.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from vllm_kvpolicy.kernels.wgkv_gate import GateWeights
from vllm_kvpolicy.policies.admissions.wgkv import Gates, save, unstacked
from vllm_kvpolicy.train.base import Base, load_base
from vllm_kvpolicy.train.reasoner_rows import ReasonerRows
from vllm_kvpolicy.train.rows import Rows
from vllm_kvpolicy.train.sources import device_of, dtype_of, rows_of, words_of
from vllm_kvpolicy.train.wgkv.loop import Settings, train
from vllm_kvpolicy.train.wgkv.measures import Figures, measure
from vllm_kvpolicy.train.wgkv.options import parse


def settings_of(given: argparse.Namespace, sparsity_weight: float) -> Settings:
    """Return the settings of one sparsity weight's run."""
    names = asdict(Settings(0)).keys() - {"sparsity_weight", "data"}
    same = {name: getattr(given, name) for name in names}
    return Settings(sparsity_weight, data=words_of(given), **same)


def gates_of(
    base: Base,
    given: argparse.Namespace,
    run: Settings,
    weights: GateWeights,
    found: Figures,
) -> Gates:
    """Return trained gates with the header of their file."""
    return Gates(
        model=given.model,
        flavour=base.flavour,
        num_layers=base.num_layers,
        num_kv_heads=base.num_kv_heads,
        head_dim=base.head_dim,
        rope_theta=base.rope_theta,
        window=run.window,
        threshold=given.threshold,
        sinks=run.sinks,
        sparsity_weight=run.sparsity_weight,
        kept_fraction=found.kept_fraction,
        tensors=unstacked(weights.tensors()),
    )


def run_all(base: Base, rows: Rows | ReasonerRows, given: argparse.Namespace) -> None:
    """Train, measure and write gates for each sparsity weight."""
    given.output.mkdir(parents=True, exist_ok=True)
    results: list[dict[str, Any]] = []
    for sparsity_weight in given.lambdas:
        run = settings_of(given, sparsity_weight)
        file = given.output / f"wgkv-{sparsity_weight:g}.safetensors"
        weights = train(
            base,
            rows.shuffled(run.seed),
            run,
            file.with_suffix(".state"),
            given.save_steps,
        )
        found = measure(
            base, rows.validation, weights, run.window, run.sinks, given.threshold
        )
        if PartialState().is_main_process:
            results.append({"file": file.name, **asdict(run), **found.to_dict()})
            write(file, gates_of(base, given, run, weights, found), results)


def write(file: Path, gates: Gates, results: list[dict[str, Any]]) -> None:
    """Write gates and the figures of all runs so far."""
    save(file, gates)
    content = {"model": gates.model, "threshold": gates.threshold, "runs": results}
    path = file.with_name("figures.json")
    path.write_text(json.dumps(content, indent=2) + "\n")
    found = results[-1]
    print(
        f"lambda {gates.sparsity_weight:g}: kept {gates.kept_fraction:.1%}; loss "
        f"{found['soft_loss']:.4g} as trained, {found['hard_loss']:.4g} as served, "
        f"{found['window_loss']:.4g} with the window alone; wrote {file}"
    )


def main(arguments: Sequence[str]) -> None:
    """Run the command.

    Raises:
        OSError, ValueError: something that was given cannot be used.
    """
    given = parse(arguments)
    if given.threads:
        torch.set_num_threads(given.threads)
    rows = rows_of(given)
    base = load_base(
        given.model,
        device_of(given),
        dtype_of(given),
        gradient_checkpointing=given.gradient_checkpointing,
    )
    run_all(base, rows, given)
    PartialState().destroy_process_group()
