"""`vllm-kvpolicy train dms`: trains a model to decide which tokens to drop.

With an adapter the model is not changed, and each compression ratio gives one small
file. With borrowed channels all weights are trained, and each ratio gives a checkpoint
folder.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from vllm_kvpolicy.policies.admissions.dms.model import DmsAdapter, save, unstacked
from vllm_kvpolicy.train.base import Base, load_base
from vllm_kvpolicy.train.dms.attention import SHIFT
from vllm_kvpolicy.train.dms.checkpoint import save_checkpoint
from vllm_kvpolicy.train.dms.loop import train
from vllm_kvpolicy.train.dms.measures import Figures, measure
from vllm_kvpolicy.train.dms.options import parse
from vllm_kvpolicy.train.dms.retrofit import Retrofit, new_adapter
from vllm_kvpolicy.train.dms.settings import Settings
from vllm_kvpolicy.train.reasoner_rows import ReasonerRows
from vllm_kvpolicy.train.rows import Rows
from vllm_kvpolicy.train.sources import device_of, dtype_of, rows_of, words_of


def settings_of(given: argparse.Namespace) -> Settings:
    """Return the settings of the run."""
    names = [item.name for item in fields(Settings) if item.name != "data"]
    return Settings(
        data=words_of(given), **{name: getattr(given, name) for name in names}
    )


def retrofit_of(given: argparse.Namespace) -> Retrofit:
    """Return teacher and student before training."""
    settings = settings_of(given)
    again = given.gradient_checkpointing
    is_adapter = settings.flavour == "adapter"
    place = device_of(given), dtype_of(given)
    teacher = load_base(
        given.model, *place, gradient_checkpointing=is_adapter and again
    )
    if is_adapter:
        return Retrofit(settings, teacher, teacher, new_adapter(teacher))
    student = load_base(given.model, *place, True, again)
    return Retrofit(settings, teacher, student)


def adapter_of(
    base: Base, model: str, retrofit: Retrofit, target: float, found: Figures
) -> DmsAdapter:
    """Return a trained adapter with the header of its file."""
    settings = retrofit.settings
    return DmsAdapter(
        model=model,
        flavour=base.flavour,
        num_layers=base.num_layers,
        num_kv_heads=base.num_kv_heads,
        hidden_size=base.hidden_size,
        window=settings.window,
        target_cr=target,
        kept_fraction=found.kept_fraction,
        tensors=unstacked(retrofit.tensors()),
        alpha_scale=settings.alpha_scale,
        alpha_offset=settings.alpha_offset,
        shift=SHIFT,
    )


def write(
    retrofit: Retrofit,
    rows: Rows | ReasonerRows,
    given: argparse.Namespace,
    target: float,
) -> None:
    """Measure the student at a target ratio, and write the result."""
    base, output, state = retrofit.teacher, given.output, PartialState()
    if retrofit.weights is not None:
        path = output / f"dms-{target:g}.safetensors"
        found = measure(retrofit, rows.validation)
        if state.is_main_process:
            save(path, adapter_of(base, given.model, retrofit, target, found))
    else:
        path = output / f"dms-{target:g}"
        if state.is_main_process:
            save_checkpoint(path, retrofit, given.model, target)
        state.wait_for_everyone()
        # Measured as written: the file's dtype rounds the weights.
        student = load_base(str(path), base.device, base.dtype)
        found = measure(replace(retrofit, student=student), rows.validation)
    if not state.is_main_process:
        return
    result = {"file": path.name, "target": target, **found.to_dict()}
    _record(output / "figures.json", given.model, retrofit.settings, result)
    print(
        f"target ratio {target:g}: reached {found.compression_ratio:.2f}, kept "
        f"{found.kept_fraction:.1%}; loss {found.soft_loss:.4g} as trained, "
        f"{found.hard_loss:.4g} as served, {found.window_loss:.4g} with the window "
        f"alone; wrote {path}",
        flush=True,
    )


def _record(path: Path, model: str, settings: Settings, result: dict[str, Any]) -> None:
    """Add a result to those of the same run; drop those of this and later targets."""
    try:
        known = json.loads(path.read_text()) if path.exists() else {}
    except ValueError as error:
        raise ValueError(f"output: {str(path)!r} is no JSON: {error}") from None
    same = json.loads(json.dumps({"model": model, "settings": asdict(settings)}))
    others = known.get("results", []) if known.items() >= same.items() else []
    others = [item for item in others if item["target"] < result["target"]]
    content = {**same, "results": [*others, result]}
    path.write_text(json.dumps(content, indent=2) + "\n")


def main(arguments: Sequence[str]) -> None:
    """Run the command.

    Raises:
        OSError, ValueError: something that was given cannot be used.
    """
    given = parse(arguments)
    if given.threads:
        torch.set_num_threads(given.threads)
    rows = rows_of(given)
    retrofit = retrofit_of(given)
    given.output.mkdir(parents=True, exist_ok=True)

    def reached(target: float) -> None:
        write(retrofit, rows, given, target)

    state = given.output / f"dms-{given.flavour}.state"
    stream = rows.shuffled(given.seed)
    train(retrofit, stream, state, reached, given.save_steps)
    PartialState().destroy_process_group()
