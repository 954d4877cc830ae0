"""`python -m training dms`: trains a model to decide which tokens to drop.

With an adapter the model is not changed, and each compression ratio gives one small
file. With borrowed channels all weights are trained, and each ratio gives a checkpoint
folder. An interrupted run resumes.

Source: DMS (arXiv 2506.05345) section 3; https://github.com/NVIDIA/Model-Optimizer/
tree/a2fbac7b/experimental/dms, where tokens of prompts count as well; the keys of
config.json are those of https://huggingface.co/nvidia/Qwen3-8B-DMS-8x. Deviations:
channels fade while the teacher is distilled, not while text is learned; divergences are
computed in blocks of tokens instead of blocks of the vocabulary; a row may say that
only answers count; a checkpoint includes no code, so a library that does not know these
keys loads it as an ordinary model and attends with the channels that decide.
"""

import argparse
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoTokenizer

from training.dms_student import (
    ADAPTER,
    BORROWED,
    SHIFT,
    Dropping,
    Retrofit,
    Settings,
    new_adapter,
    noise_of,
)
from training.figures import Figures, figures_of
from training.model import Base, Student, load_base
from training.options import (
    add_machine,
    add_model,
    add_rows,
    check_numbers,
    device_of,
    dtype_of,
    kept_of,
    rows_of,
    settings_of,
)
from training.rows import ReasonerRows, Row, Rows
from training.run import Run
from vllm_kvpolicy.policies.admissions.dms.model import DmsAdapter

BLOCK = 512  # tokens whose logits are in memory at once
BETAS = (0.9, 0.95)  # of Adam
LARGEST_GRADIENT = 1.0  # gradients are clipped to this norm
VALIDATION = -1  # replaces the step in the seed of noise
LENGTHS = {"adapter": 32768, "borrowed": 8192}  # tokens of a row
SETTINGS = {"adapter": ADAPTER, "borrowed": BORROWED}
POSITIVE = (
    "steps_per_ratio",
    "alpha_scale",
    "temperature",
    "compression_weight",
    "learning_rate",
    "hold_rate",
)


def distillation(
    student: Base,
    student_hidden: torch.Tensor,
    teacher: Base,
    teacher_hidden: torch.Tensor,
    row: Row,
) -> tuple[torch.Tensor, int]:
    """Sum the divergences KL(student || teacher) of next tokens.

    Args:
        student: its output embedding turns `student_hidden` into logits.
        student_hidden: [1, T, d], see `Base.hidden`.
        row: tokens that follow the end of a text do not count either.

    Returns:
        The sum, float32, and over how many tokens it is.
    """
    ends = torch.tensor(teacher.ends, dtype=row.ids.dtype)
    counts = ~torch.isin(row.ids, ends)
    if row.counts is not None:
        counts &= row.counts
    number = int(counts.sum())
    counts = counts.to(teacher.device)
    total = torch.zeros((), device=teacher.device)
    for start in range(0, len(row), BLOCK):
        part = slice(start, start + BLOCK)
        # The backward pass recomputes logits instead of keeping them.
        total = total + checkpoint(
            _divergence,
            student,
            student_hidden[0, part],
            teacher,
            teacher_hidden[0, part],
            counts[part],
            use_reentrant=False,
        )
    return total, number


def _divergence(
    student: Base,
    student_hidden: torch.Tensor,
    teacher: Base,
    teacher_hidden: torch.Tensor,
    counts: torch.Tensor,
) -> torch.Tensor:
    """Return the sum of the divergences of the tokens that count."""
    own = student.logits(student_hidden).log_softmax(-1)
    wanted = teacher.logits(teacher_hidden).log_softmax(-1)
    divergences = (own.exp() * (own - wanted)).sum(-1)
    return divergences.masked_fill(~counts, 0.0).sum()


def compression(alphas: torch.Tensor, wanted: float) -> torch.Tensor:
    """Return how far the mean decision is below `wanted`, 0 if it is above."""
    return (wanted - alphas.mean()).clamp(min=0)


def train(
    retrofit: Retrofit,
    rows: Iterator[Row],
    state: Path,
    reached: Callable[[float], None],
    save_steps: int = 100,
) -> None:
    """Train in place to the end, starting from the state file if there is one.

    Args:
        rows: in the same order each time; see `Run.take`.
        state: state file; kept when the run is done.
        reached: called with each target when it is reached.

    Raises:
        ValueError: see `Run.take`.
    """
    settings, tensors = retrofit.settings, retrofit.tensors()

    def begin(step: int) -> float:
        if retrofit.weights is None and step == settings.fade_steps:
            retrofit.clear_channels()
        return settings.rate(step)

    run = Run(
        name=settings.flavour,
        settings=settings,
        tensors=tensors,
        losses=partial(_losses, retrofit),
        optimizer=torch.optim.Adam(list(tensors.values()), betas=BETAS),
        begin=begin,
        state=state,
        save_steps=save_steps,
        largest_gradient=LARGEST_GRADIENT,
    )
    milestones = {
        done: partial(reached, target) for done, target in settings.milestones.items()
    }
    run.take(rows, milestones)


def _losses(
    retrofit: Retrofit, step: int, index: int, row: Row
) -> dict[str, torch.Tensor]:
    """Return the loss of a row, its distillation loss, mean decision and the target."""
    settings, teacher = retrofit.settings, retrofit.teacher
    with torch.no_grad():
        wanted = teacher.hidden(row.ids)
    fade = settings.fade(step)
    noise = None
    if fade is None:
        noise = noise_of(teacher, len(row), settings.seed, step, index)
    student = retrofit.dropping(noise=noise, fade=fade)
    got = retrofit.student.hidden(row.ids, student)
    total, number = distillation(retrofit.student, got, teacher, wanted, row)
    distilled = total / max(number, 1)
    target = torch.full_like(distilled, settings.dropped(step))
    loss, dropped = distilled, torch.zeros_like(distilled)
    if fade is None:
        alphas = student.alphas()
        dropped = alphas.mean()
        missing = compression(alphas, settings.dropped(step))
        loss = distilled + settings.compression_weight * missing
    return {
        "loss": loss,
        "distillation": distilled,
        "dropped": dropped,
        "wanted": target,
    }


def measure(retrofit: Retrofit, rows: Sequence[Row]) -> Figures:
    """Measure a model on validation rows, at least one."""
    base, settings = retrofit.teacher, retrofit.settings

    def passes(index: int, row: Row) -> list[Dropping]:
        noise = noise_of(base, len(row), settings.seed, VALIDATION, index)
        served, alone = retrofit.dropping(), retrofit.dropping(least=-torch.inf)
        return [retrofit.dropping(noise=noise), served, alone]

    def loss(
        row: Row, student: Student, wanted: torch.Tensor
    ) -> tuple[torch.Tensor, int]:
        got = retrofit.student.hidden(row.ids, student)
        return distillation(retrofit.student, got, base, wanted, row)

    return figures_of(base, rows, passes, loss, settings.window + 1, SHIFT)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options; a wrong one ends the process."""
    parser = argparse.ArgumentParser(
        prog="python -m training dms",
        description="Train a model to drop tokens (DMS). The defaults are NVIDIA's "
        "recipe for Qwen3-8B with an adapter, or the paper's with a borrowed "
        "channel. The same command resumes an interrupted run.",
    )
    add_model(parser)
    add_rows(parser, length=0, validation_rows=64)
    _add_method(parser)
    add_machine(parser)
    given = parser.parse_args(arguments)
    plain = SETTINGS[given.flavour]
    given.length = given.length or LENGTHS[given.flavour]
    for item in fields(plain):
        if getattr(given, item.name, None) is None:
            setattr(given, item.name, getattr(plain, item.name))
    given.targets = tuple(given.targets)
    check_numbers(parser, given)
    _check(parser, given)
    return given


def _check(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    """End the command if a number is out of range."""
    for name in POSITIVE:
        value = getattr(given, name)
        if not 0 < value < math.inf:
            parser.error(f"{name}: got {value}, expected a number above 0")
    if not math.isfinite(given.alpha_offset):
        parser.error(
            f"alpha_offset: got {given.alpha_offset}, expected a finite number"
        )
    rising = [1.0, *given.targets]
    if any(b <= a or b == math.inf for a, b in zip(rising, rising[1:], strict=False)):
        parser.error(
            f"targets: got {given.targets}, expected increasing numbers above 1"
        )
    if given.flavour == "adapter" and given.fade_steps:
        parser.error(
            "fade_steps: only for --flavour borrowed, leave it out with an adapter"
        )


def _add_method(parser: argparse.ArgumentParser) -> None:
    """Add the options of the method; None means the default of the flavour."""
    parser.add_argument(
        "--flavour",
        choices=tuple(SETTINGS),
        default="adapter",
        help="adapter: added layers decide and the model is unchanged; borrowed: a "
        "query channel decides and all weights are trained (default: adapter)",
    )

    def add(name: str, kind: Any, text: str, **more: Any) -> None:
        flag = "--" + name.replace("_", "-")
        both = " or ".join(
            dict.fromkeys(str(getattr(plain, name)) for plain in SETTINGS.values())
        )
        told = f"{text} (default: {both})"
        parser.add_argument(flag, type=kind, help=told, **more)

    text = "compression ratios to reach in turn; each writes a result"
    add("targets", float, text, nargs="+", metavar="RATIO")
    add("steps_per_ratio", float, "steps over which the ratio rises by 1")
    add("hold_steps", int, "steps to hold the ratio at each target")
    add("fade_steps", int, "steps over which borrowed channels fade out at the start")
    add("window", int, "preceding tokens that a query always sees")
    add("alpha_scale", float, "scale of the decision logit")
    add("alpha_offset", float, "offset subtracted from the scaled logit")
    add("temperature", float, "temperature of the decisions in training")
    text = "weight of the loss term for dropping too few tokens"
    add("compression_weight", float, text)
    add("rows_per_step", int, "rows per step")
    add("learning_rate", float, "learning rate of Adam")
    add("hold_rate", float, "factor on the learning rate while the ratio is held")
    add("seed", int, "random seed of noise and row order")


@torch.no_grad()
def save_checkpoint(
    folder: Path, retrofit: Retrofit, model: str, target: float
) -> None:
    """Write the student in the dtype of the model's config; overwrites the folder.

    Args:
        retrofit: one with borrowed channels.
        model: folder or name of the original model, for its tokenizer.
    """
    settings, student = retrofit.settings, retrofit.student.model
    config = AutoConfig.from_pretrained(model)
    dtype = config.dtype or torch.float32
    made: dict[int, torch.Tensor] = {}  # by address, so that tied weights stay tied
    weights = {
        name: made.setdefault(tensor.data_ptr(), tensor.to(dtype))
        for name, tensor in student.state_dict().items()
    }
    student.save_pretrained(folder, state_dict=weights)
    for path in folder.glob("*.safetensors"):
        path.chmod(path.stat().st_mode | 0o444)  # a server may run as another user
    config.dms_window_size = settings.window
    config.dms_cr = int(target) if target == int(target) else target
    config.dms_alpha_scale = settings.alpha_scale
    config.dms_initial_alpha_offset = settings.alpha_offset
    config.dms_separate_alpha = False
    config.save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)


def retrofit_of(given: argparse.Namespace) -> Retrofit:
    """Return teacher and student before training."""
    settings = settings_of(given, Settings)
    again = given.gradient_checkpointing
    is_adapter = settings.flavour == "adapter"
    place = device_of(given), dtype_of(given)
    teacher = load_base(
        given.model,
        *place,
        gradient_checkpointing=is_adapter and again,
        kept=kept_of(given),
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
        tensors=DmsAdapter.unstacked(retrofit.tensors()),
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
            adapter_of(base, given.model, retrofit, target, found).save(path)
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
        f"{found.kept_fraction:.1%}; {found.losses_in_words()}; wrote {path}",
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
