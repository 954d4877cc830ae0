"""Owns the training of the reasoner: steps, optimiser, resumption, command line.

    python -m reasoner.train --preset small --run runs/small --export DIRECTORY

Problems are generated as training goes and never repeat. Each step takes a few batches,
each of one family and one size, so all rows of a batch have the same length and nothing
is padded. A family's problems grow once those of the present size are solved. The same
command continues an interrupted run from its last saved state; with ``--steps 0`` it
only exports that state. Process: one per core, or one for a GPU.
"""

import argparse
import random
import time
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import AttentionInterface, Qwen3ForCausalLM

from reasoner.batches import make_batch, spread_positions
from reasoner.curriculum import Progress, pick_size
from reasoner.model import export_checkpoint, new_model
from reasoner.presets import PRESETS
from vllm_kvpolicy.commands.outputs import new_folder

END_TOKENS, END_WEIGHT = 8, 5.0
"""The last question and the answer count more: few tokens that decide everything."""


def training_attention(module, query, key, value, mask, scaling, **_):
    """Causal attention, in float32 where a CPU runs a bfloat16 forward pass.

    On a CPU the flash kernel gains nothing from bfloat16, and for short rows its
    backward pass is several times slower in it.

    Args:
        module: the attention layer, for its number of queries per KV head.
        query: [B, Hq, T, D].
        key: [B, H, T, D].
        value: [B, H, T, D].

    Returns:
        Output [B, T, Hq, D] and None for the weights.
    """
    groups, device = module.num_key_value_groups, query.device.type
    with torch.autocast(device, enabled=False):
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        out = F.scaled_dot_product_attention(
            query.to(dtype),
            key.to(dtype).repeat_interleave(groups, 1),
            value.to(dtype).repeat_interleave(groups, 1),
            is_causal=True,
            scale=scaling,
        )
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register("reasoner_training", training_attention)


def loss_and_share(
    model: Qwen3ForCausalLM,
    ids: torch.Tensor,
    positions: torch.Tensor,
    prompt_tokens: int,
) -> tuple[torch.Tensor, float]:
    """Computes the loss on the completions and the share of tokens predicted.

    Args:
        ids: [B, T] int64, on the CPU.
        positions: [B, T] int64 position ids, on the CPU.
        prompt_tokens: leading tokens of each row without loss.

    Returns:
        Weighted mean cross entropy in nats, and the share of completion tokens to which
        the model gives the highest probability.
    """
    ids, positions = ids.to(model.device), positions.to(model.device)
    targets = ids[:, prompt_tokens:]
    device = model.device.type
    # A CPU without bfloat16 of its own takes several times as long as with float32.
    is_fast = device != "cpu" or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    with torch.autocast(device, torch.bfloat16, enabled=is_fast):
        hidden = model.model(
            ids[:, :-1], position_ids=positions[:, :-1], use_cache=False
        ).last_hidden_state
        logits = model.lm_head(hidden[:, prompt_tokens - 1 :]).float()
        losses = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    weights = torch.ones(targets.shape[1], device=model.device)
    weights[-END_TOKENS:] = END_WEIGHT
    loss = (losses * weights).mean() / weights.mean()
    right = logits.detach().argmax(-1) == targets
    return loss, right.float().mean().item()


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Warm-up, constant, then linear decay over the last ``--decay`` steps."""
    left = (args.steps - step) / max(1, args.decay)
    return args.lr * min(1.0, (step + 1) / args.warmup, max(left, 0.01))


def budget_tokens(step: int, args: argparse.Namespace) -> int:
    """Tokens per step: small at first, when steps count more than tokens."""
    share = min(1.0, step / args.grow_steps)
    return round(args.first_tokens + share * (args.step_tokens - args.first_tokens))


def make_optimizers(model: Qwen3ForCausalLM, args: argparse.Namespace) -> list:
    """Returns AdamW for everything, or Muon for matrices and AdamW for the rest."""
    matrices = [
        p for n, p in model.named_parameters() if p.ndim == 2 and "emb" not in n
    ]
    matrices = matrices if args.muon_lr else []
    chosen = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in chosen]
    optimizers = [torch.optim.AdamW(others, args.lr, (0.9, 0.98), weight_decay=0.01)]
    if matrices:
        optimizers.append(
            torch.optim.Muon(
                matrices, args.muon_lr, 0.01, adjust_lr_fn="match_rms_adamw"
            )
        )
    return optimizers


def average(model: Qwen3ForCausalLM, figures: list[float]) -> list[float]:
    """Averages gradients and a few figures over all processes.

    Args:
        model: with gradients, which are overwritten.

    Returns:
        The figures' means.
    """
    if not dist.is_initialized():
        return figures
    grads = [p.grad for p in model.parameters()]
    flat = torch.cat([torch.tensor(figures)] + [grad.flatten() for grad in grads])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    mean, *parts = flat.split([len(figures)] + [grad.numel() for grad in grads])
    for grad, part in zip(grads, parts, strict=True):
        grad.copy_(part.view_as(grad))
    return mean.tolist()


def train_step(
    model: Qwen3ForCausalLM, optimizers: list, progress: Progress, args, spent: float
) -> list[tuple[str, float]]:
    """Runs one step, shared among all processes, and updates the progress.

    Args:
        progress: the same in all processes, before and after.
        spent: seconds that the step before took in this process.

    Returns:
        Family and loss in nats, for each batch of the step.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    budget = budget_tokens(progress.step, args) // args.processes // args.mix
    rate = learning_rate(progress.step, args) / args.lr
    rng = random.Random(progress.next_seed)
    drawn = [pick_size(rng, progress, args.largest) for _ in range(args.mix)]
    figures = [spent]
    for family, lines in drawn:
        first_seed = progress.next_seed + rank * budget
        ids, prompt_tokens = make_batch(family, lines, budget, first_seed)
        reach = PRESETS[args.preset].max_position
        positions = spread_positions(ids, first_seed, reach)
        loss, share = loss_and_share(model, ids, positions, prompt_tokens)
        (loss / args.mix).backward()
        figures += [loss.item(), share]
        progress.tokens += ids.numel() * args.processes
        progress.next_seed += budget * args.processes
    spent, *figures = average(model, figures)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group.setdefault("peak_lr", group["lr"]) * rate
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    losses, shares = figures[::2], figures[1::2]
    for (family, lines), share in zip(drawn, shares, strict=True):
        progress.ladders[family].record(lines, share, args.largest[family], args.target)
    progress.step += 1
    progress.seconds += spent
    return [(family, loss) for (family, _), loss in zip(drawn, losses, strict=True)]


def save_state(path: Path, preset: str, model, optimizers, progress) -> None:
    """Writes the whole state of a run by one rename."""
    state = {
        "preset": preset,
        "model": model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        "progress": asdict(progress),
    }
    torch.save(state, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


def load_state(path: Path, args, model, optimizers: list) -> Progress:
    """Restores a saved run in place, if there is one, and returns its progress.

    Raises:
        ValueError: the run is one of another preset or of other families.
    """
    if not path.exists():
        return Progress.start(args.largest)
    state = torch.load(path, map_location=model.device, weights_only=True)
    if state["preset"] != args.preset:
        raise ValueError(f"preset: expected {state['preset']!r}, got {args.preset!r}")
    families = list(state["progress"]["ladders"])
    if families != list(args.largest):
        raise ValueError(f"families: expected {families}, got {list(args.largest)}")
    model.load_state_dict(state["model"])
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    return Progress.from_dict(state["progress"])


def report(progress: Progress, losses: dict[str, float]) -> str:
    """Returns one line about where the run stands.

    For each family: present size in lines, share of the trace tokens predicted at that
    size (0 right after it grew), and the loss over the last steps at any size.
    """
    parts = [
        f"{name}:{row.lines} {row.right:.3f} ({losses.get(name, 0):.4f})"
        for name, row in progress.ladders.items()
    ]
    return (
        f"step {progress.step} tokens {progress.tokens / 1e6:.2f}M "
        f"{progress.seconds:.0f}s | " + " ".join(parts)
    )


def train(rank: int, args: argparse.Namespace) -> None:
    """Trains until ``--steps`` or ``--minutes``; process 0 saves and exports."""
    torch.set_num_threads(1)
    if args.processes > 1:
        meeting = f"file://{(args.run / 'meeting').resolve()}"
        dist.init_process_group(
            "gloo", init_method=meeting, rank=rank, world_size=args.processes
        )
    state_path = args.run / "state.pt"
    model = new_model(args.preset, args.seed).to(args.device)
    model.set_attn_implementation("reasoner_training")
    optimizers = make_optimizers(model, args)
    progress = load_state(state_path, args, model, optimizers)
    losses: dict[str, float] = {}
    until = progress.seconds + 60 * args.minutes
    began = saved_at = time.monotonic()
    spent = 0.0
    while progress.step < args.steps and progress.seconds < until:
        for family, loss in train_step(model, optimizers, progress, args, spent):
            losses[family] = 0.9 * losses.get(family, loss) + 0.1 * loss
        now = time.monotonic()
        spent, began = now - began, now
        if rank == 0 and progress.step % args.report == 0:
            print(report(progress, losses), flush=True)
        ended = progress.step == args.steps or progress.seconds >= until
        if rank == 0 and (ended or now - saved_at > args.save_seconds):
            save_state(state_path, args.preset, model, optimizers, progress)
            saved_at = now
    if rank == 0 and args.export:
        note = training_note(progress, args)
        export_checkpoint(model, args.export, args.preset, note)


def training_note(progress: Progress, args: argparse.Namespace) -> dict:
    """Returns the figures of a run for ``training.json``."""
    return {
        "preset": args.preset,
        "steps": progress.step,
        "tokens": progress.tokens,
        "seconds": round(progress.seconds),
        "lines": {name: row.lines for name, row in progress.ladders.items()},
        "right": {name: round(row.right, 4) for name, row in progress.ladders.items()},
        "arguments": {
            name: value
            for name, value in vars(args).items()
            if isinstance(value, int | float) and name not in ("steps", "minutes")
        },
    }


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line; what it leaves out comes from the preset."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument(
        "--run", type=new_folder, required=True, help="folder of the state"
    )
    parser.add_argument(
        "--export", type=new_folder, help="checkpoint folder to replace"
    )
    parser.add_argument("--preset", choices=PRESETS, default="small")
    parser.add_argument("--families", nargs="+", help="only these of the preset's")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="then stop")
    gpu = torch.cuda.is_available()
    parser.add_argument("--device", default="cuda" if gpu else "cpu")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--decay", type=int, help="steps of decay")
    parser.add_argument("--warmup", type=int, default=100, help="steps")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--muon-lr", type=float, default=6e-3, help="0: AdamW only")
    parser.add_argument("--first-tokens", type=int, help="per step")
    parser.add_argument("--step-tokens", type=int, help="per step")
    parser.add_argument("--grow-steps", type=int)
    parser.add_argument("--mix", type=int, default=4, help="batches per step")
    parser.add_argument("--target", type=float, default=0.97, help="to grow sizes at")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, help="one core each")
    parser.add_argument("--report", type=int, default=50, help="steps")
    parser.add_argument("--save-seconds", type=float, default=60)
    args = parser.parse_args(argv)
    preset = PRESETS[args.preset]
    for name in ("steps", "decay", "first_tokens", "step_tokens", "grow_steps"):
        if getattr(args, name) is None:
            setattr(args, name, getattr(preset, name))
    unknown = set(args.families or ()) - set(preset.largest)
    if unknown:
        parser.error(f"--families: expected some of {list(preset.largest)}")
    args.largest = {
        family: lines
        for family, lines in preset.largest.items()
        if args.families is None or family in args.families
    }
    if args.processes is None:
        args.processes = 1 if args.device != "cpu" else preset.processes
    return args


def main(argv: list[str] | None = None) -> None:
    """Starts the training processes of the command line."""
    args = parse_args(argv)
    args.run.mkdir(parents=True, exist_ok=True)
    (args.run / "meeting").unlink(missing_ok=True)
    torch.multiprocessing.spawn(train, (args,), args.processes)


if __name__ == "__main__":
    main()
