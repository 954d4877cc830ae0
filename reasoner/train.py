"""Owns the training of the reasoner: curriculum, batches, optimiser, resumption.

    python -m reasoner.train --run runs/reasoner --export reasoner/checkpoint

Problems are generated as training goes and never repeat. Each step takes one family
and one size, so all rows of a batch have the same length and nothing is padded. A
family's problems grow once those of the present size are solved. The same command
continues an interrupted run from its last saved state.
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

from reasoner.curriculum import LARGEST, Progress, pick_size
from reasoner.model import export_checkpoint, new_model
from reasoner.problems import generate
from reasoner.tokenizer import ASSISTANT, EOS, chat_prompt, encode, vocabulary

END_TOKENS, END_WEIGHT = 8, 5.0
"""The last question and the answer count more: few tokens that decide everything."""
MAX_POSITION = 1300
"""Positions that gaps between lines may reach in training."""


def make_batch(
    family: str, lines: int, budget_tokens: int, first_seed: int
) -> tuple[torch.Tensor, int]:
    """Generates one batch of equally long problems.

    Args:
        family: generator name.
        lines: size of each problem.
        budget_tokens: upper bound on rows * length, at least one row.
        first_seed: seed of the first row, the others follow.

    Returns:
        Token ids [B, T] int64, and the number of prompt tokens per row.
    """
    rows: list[list[int]] = []
    prompt_tokens = 0
    while not rows or (len(rows) + 1) * len(rows[0]) <= budget_tokens:
        problem = generate(family, lines, first_seed + len(rows))
        prompt = encode(chat_prompt(problem.prompt))
        prompt_tokens = len(prompt)
        rows.append(prompt + encode(problem.completion + EOS))
    return torch.tensor(rows), prompt_tokens


def training_attention(module, query, key, value, mask, scaling, **_):
    """Causal attention in float32 inside a bfloat16 forward pass.

    On a CPU the flash kernel gains nothing from bfloat16, and for short rows its
    backward pass is several times slower in it.

    Args:
        module: the attention layer, for its number of queries per KV head.
        query: [B, Hq, T, D].
        key: [B, H, T, D].
        value: [B, H, T, D].
        mask: unused, rows are never padded.
        scaling: factor on the scores.

    Returns:
        Output [B, T, Hq, D] and None for the weights.
    """
    groups = module.num_key_value_groups
    key = key.float().repeat_interleave(groups, 1)
    value = value.float().repeat_interleave(groups, 1)
    with torch.autocast("cpu", enabled=False):
        out = F.scaled_dot_product_attention(
            query.float(), key, value, is_causal=True, scale=scaling
        )
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register("reasoner_training", training_attention)


def spread_positions(ids: torch.Tensor, seed: int) -> torch.Tensor:
    """Draws position ids with a few gaps between lines of the trace.

    Short problems then show the model the distances of long ones. Three rows in five
    have no gap; in the others, a gap follows the prompt and about three lines, up to
    ``MAX_POSITION`` in all. The prompt has none: where the next line is, the model
    learns from the tokens just before it.

    Args:
        ids: [B, T] int64 token ids.
        seed: seed of the gaps.

    Returns:
        [B, T] int64 position ids, ascending in each row from 0.
    """
    draw = torch.Generator().manual_seed(seed)
    rows, tokens = ids.shape
    vocab = vocabulary()
    prompt_end = ids == vocab[ASSISTANT]
    ends = ((ids == vocab[";"]) | (ids == vocab["?"])) & prompt_end.cumsum(1).bool()
    chosen = torch.rand(rows, tokens, generator=draw) * ends.sum(1, True) < 3
    shares = torch.rand(rows, tokens, generator=draw) * (ends & chosen | prompt_end)
    shares /= shares.sum(1, True).clamp_min(1e-6)
    total = torch.rand(rows, 1, generator=draw) * max(0, MAX_POSITION - tokens)
    total *= torch.rand(rows, 1, generator=draw) < 0.4
    gaps = (shares * total).long().roll(1, 1)
    return torch.arange(tokens) + gaps.cumsum(1)


def loss_and_share(
    model: Qwen3ForCausalLM, ids: torch.Tensor, prompt_tokens: int, seed: int
) -> tuple[torch.Tensor, float]:
    """Computes the loss on the completions and the share of tokens predicted.

    Args:
        model: the model in training mode.
        ids: [B, T] int64.
        prompt_tokens: leading tokens of each row without loss.
        seed: seed of the position ids.

    Returns:
        Weighted mean cross entropy in nats, and the share of completion tokens to which
        the model gives the highest probability.
    """
    targets = ids[:, prompt_tokens:]
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.model(
            ids[:, :-1],
            position_ids=spread_positions(ids[:, :-1], seed),
            use_cache=False,
        ).last_hidden_state
        logits = model.lm_head(hidden[:, prompt_tokens - 1 :]).float()
        losses = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    weights = torch.ones(targets.shape[1])
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
        figures: numbers of this process.

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
    model: Qwen3ForCausalLM, optimizers: list, progress: Progress, args
) -> tuple[str, float]:
    """Runs one step, shared among all processes, and updates the progress.

    Returns:
        Family and loss in nats.
    """
    rng = random.Random(progress.next_seed)
    family, lines = pick_size(rng, progress)
    rank = dist.get_rank() if dist.is_initialized() else 0
    budget = budget_tokens(progress.step, args) // args.processes
    first_seed = progress.next_seed + rank * budget
    ids, prompt_tokens = make_batch(family, lines, budget, first_seed)
    rate = learning_rate(progress.step, args) / args.lr
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group.setdefault("peak_lr", group["lr"]) * rate
    loss, share = loss_and_share(model, ids, prompt_tokens, first_seed)
    loss.backward()
    mean_loss, share = average(model, [loss.item(), share])
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    progress.ladders[family].record(lines, share, LARGEST[family], args.target)
    progress.step += 1
    progress.tokens += ids.numel() * args.processes
    progress.next_seed += budget * args.processes
    return family, mean_loss


def save_state(path: Path, model, optimizers: list, progress: Progress) -> None:
    """Writes the whole state of a run by one rename."""
    state = {
        "model": model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        "progress": asdict(progress),
    }
    torch.save(state, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


def report(progress: Progress, losses: dict[str, float]) -> str:
    """Returns one line about where the run stands."""
    parts = [
        f"{name} {row.lines} lines {row.right:.3f} loss {losses.get(name, 0):.4f}"
        for name, row in progress.ladders.items()
    ]
    return (
        f"step {progress.step} tokens {progress.tokens / 1e6:.2f}M "
        f"{progress.seconds:.0f}s | " + " | ".join(parts)
    )


def load_state(path: Path, model, optimizers: list) -> Progress:
    """Restores a saved run in place, if there is one, and returns its progress."""
    if not path.exists():
        return Progress()
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    return Progress.from_dict(state["progress"])


def train(rank: int, args: argparse.Namespace) -> None:
    """Trains until ``--steps``; the first process reports, saves and exports."""
    torch.set_num_threads(1)
    if args.processes > 1:
        meeting = f"file://{(args.run / 'meeting').resolve()}"
        dist.init_process_group(
            "gloo", init_method=meeting, rank=rank, world_size=args.processes
        )
    state_path = args.run / "state.pt"
    model = new_model(args.seed)
    model.set_attn_implementation("reasoner_training")
    optimizers = make_optimizers(model, args)
    progress = load_state(state_path, model, optimizers)
    losses: dict[str, float] = {}
    last = saved_at = time.monotonic()
    while progress.step < args.steps:
        family, loss = train_step(model, optimizers, progress, args)
        losses[family] = 0.9 * losses.get(family, loss) + 0.1 * loss
        now = time.monotonic()
        progress.seconds, last = progress.seconds + now - last, now
        if rank == 0 and progress.step % args.report == 0:
            print(report(progress, losses), flush=True)
        due = now - saved_at > args.save_seconds or progress.step == args.steps
        if rank == 0 and due:
            save_state(state_path, model, optimizers, progress)
            saved_at = now
    if rank == 0 and args.export:
        export_checkpoint(model, args.export, training_note(progress, args))


def training_note(progress: Progress, args: argparse.Namespace) -> dict:
    """Returns the figures of a run for ``training.json``."""
    return {
        "steps": progress.step,
        "tokens": progress.tokens,
        "seconds": round(progress.seconds),
        "lines": {name: row.lines for name, row in progress.ladders.items()},
        "arguments": {
            name: value
            for name, value in vars(args).items()
            if isinstance(value, int | float)
        },
    }


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--run", type=Path, required=True, help="folder of the state")
    parser.add_argument("--export", type=Path, help="checkpoint folder to replace")
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--decay", type=int, default=900, help="steps of decay")
    parser.add_argument("--warmup", type=int, default=100, help="steps")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--muon-lr", type=float, default=6e-3, help="0: AdamW only")
    parser.add_argument("--first-tokens", type=int, default=3072, help="per step")
    parser.add_argument("--step-tokens", type=int, default=6144, help="per step")
    parser.add_argument("--grow-steps", type=int, default=3000)
    parser.add_argument("--target", type=float, default=0.97, help="to grow sizes at")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2, help="one core each")
    parser.add_argument("--report", type=int, default=50, help="steps")
    parser.add_argument("--save-seconds", type=float, default=60)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Starts the training processes of the command line."""
    args = parse_args(argv)
    args.run.mkdir(parents=True, exist_ok=True)
    (args.run / "meeting").unlink(missing_ok=True)
    torch.multiprocessing.spawn(train, (args,), args.processes)


if __name__ == "__main__":
    main()
