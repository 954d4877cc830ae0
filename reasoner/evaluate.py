"""Owns the accuracy figures: greedy decoding with a full or a streaming KV cache.

    python -m reasoner.evaluate reasoner/checkpoint
    python -m reasoner.evaluate reasoner/checkpoint copy:110 sub:80 --problems 200
    python -m reasoner.evaluate reasoner/checkpoint copy:110 --sinks 4 --recent 124

Without tasks, every family that the checkpoint was trained on is measured at three
trained sizes, at a held-out difficulty and with a held-out template. Problems are
those that training skips by their hash, and their seeds lie below training's.

Uses transformers only, in float32. With ``--recent``, each generated token attends to
the first ``--sinks`` tokens and the last ``--recent`` ones, itself included, as in
StreamingLLM, but at its logical position; the prompt is read with full attention.
"""

import argparse
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from reasoner.intervals import wilson
from reasoner.presets import longer
from reasoner.problems import (
    FAMILIES,
    HELD_OUT_TEMPLATES,
    Problem,
    generate,
    held_out,
    is_correct,
)
from vllm_kvpolicy.commands.outputs import new_file


@dataclass(frozen=True)
class CacheRule:
    """Which tokens of the cache a generated token may attend to.

    Attributes:
        recent: newest tokens, the querying one included; 0 keeps the whole cache.
        sinks: first tokens, used only with ``recent``.
        keep_prompt: whether the whole prompt stays, used only with ``recent``.
    """

    recent: int = 0
    sinks: int = 4
    keep_prompt: bool = False

    def mask(self, rows: int, held: int, prompt_tokens: int) -> torch.Tensor | None:
        """Returns the mask of one decode step, or None for a full cache.

        Args:
            rows: batch size B.
            held: tokens up to and including the querying one, T.

        Returns:
            [B, 1, 1, T] bool, True where attention is allowed.
        """
        if not self.recent:
            return None
        position = torch.arange(held)
        first = prompt_tokens if self.keep_prompt else self.sinks
        allowed = (position < first) | (position >= held - self.recent)
        return allowed.expand(rows, 1, 1, held)


@dataclass(frozen=True)
class Task:
    """What one row of the report measures.

    Attributes:
        kind: ``trained``, ``longer``, ``template`` (both held out), or ``asked``.
    """

    family: str
    lines: int
    template: int = 0
    kind: str = "asked"

    def problems(self, count: int, first_seed: int) -> list[Problem]:
        """Returns the first ``count`` problems that no training run sees."""
        found: list[Problem] = []
        seed = first_seed
        while len(found) < count:
            problem = generate(self.family, self.lines, seed, self.template)
            if held_out(problem):
                found.append(problem)
            seed += 1
        return found


def report_tasks(sizes: Mapping[str, int]) -> list[Task]:
    """Returns the tasks of a whole report.

    Args:
        sizes: the largest size of each family in training, in lines.
    """
    tasks: list[Task] = []
    for family, most in sizes.items():
        trained = sorted({max(3, most // 4), max(3, most // 2), most})
        tasks += [Task(family, lines, 0, "trained") for lines in trained]
        if (lines := longer(family, most)) > most:
            tasks.append(Task(family, lines, 0, "longer"))
        template = HELD_OUT_TEMPLATES[len(tasks) % len(HELD_OUT_TEMPLATES)]
        tasks.append(Task(family, max(3, most // 2), template, "template"))
    return tasks


@dataclass(frozen=True)
class Score:
    """Accuracy on one family and size.

    Attributes:
        prompt_tokens: tokens of a prompt, template included.
        trace_tokens: tokens of the longest trace.
        correct: how many had the right boxed answer.
        exact: how many had the right trace, token for token.
        low: lower end of the 95 % Wilson interval of the accuracy.
        high: upper end.
    """

    family: str
    lines: int
    prompt_tokens: int
    trace_tokens: int
    problems: int
    correct: int
    exact: int
    low: float
    high: float
    seconds: float
    template: int = 0
    kind: str = "asked"


@torch.inference_mode()
def decode(
    model: PreTrainedModel, prompts: torch.Tensor, limit: int, rule: CacheRule
) -> torch.Tensor:
    """Generates greedily until every row has ended.

    Args:
        prompts: [B, P] int64, rows of equal length.
        rule: which cached tokens a generated one may attend to.

    Returns:
        Generated ids [B, at most limit] int64, the pad id after the end of a row.
    """
    eos, pad = model.config.eos_token_id, model.config.pad_token_id
    rows, prompt_tokens = prompts.shape
    out = model(prompts, use_cache=True, logits_to_keep=1)
    ended = torch.zeros(rows, dtype=torch.bool)
    generated: list[torch.Tensor] = []
    while True:
        token = out.logits[:, -1].argmax(-1).masked_fill(ended, pad)
        generated.append(token)
        ended |= token == eos
        if bool(ended.all()) or len(generated) == limit:
            return torch.stack(generated, 1)
        held = prompt_tokens + len(generated)
        out = model(
            token[:, None],
            attention_mask=rule.mask(rows, held, prompt_tokens),
            position_ids=torch.full((rows, 1), held - 1),
            past_key_values=out.past_key_values,
            use_cache=True,
        )


def encode_prompts(tokenizer, problems: list[Problem]) -> torch.Tensor:
    """Returns the chat prompts as ids [B, P] int64; all must be equally long."""
    rows = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": problem.prompt}],
            add_generation_prompt=True,
            return_dict=False,
        )
        for problem in problems
    ]
    return torch.tensor(rows)


def score(
    model: PreTrainedModel,
    tokenizer,
    problems: list[Problem],
    rule: CacheRule,
    batch_rows: int,
) -> Score:
    """Measures the accuracy on problems of one family and size.

    Args:
        problems: non-empty, with prompts of equal length in tokens.

    Returns:
        Counts and interval.
    """
    start = time.monotonic()
    prompts = encode_prompts(tokenizer, problems)
    trace_tokens = max(len(tokenizer(p.trace).input_ids) for p in problems)
    limit = trace_tokens * 5 // 4 + 32
    texts: list[str] = []
    for first in range(0, len(problems), batch_rows):
        ids = decode(model, prompts[first : first + batch_rows], limit, rule)
        texts += tokenizer.batch_decode(ids, skip_special_tokens=True)
    pairs = list(zip(problems, texts, strict=True))
    correct = sum(is_correct(problem, text) for problem, text in pairs)
    return Score(
        family=problems[0].family,
        lines=problems[0].lines,
        prompt_tokens=prompts.shape[1],
        trace_tokens=trace_tokens,
        problems=len(problems),
        correct=correct,
        exact=sum(text == problem.completion for problem, text in pairs),
        low=wilson(correct, len(problems))[0],
        high=wilson(correct, len(problems))[1],
        seconds=round(time.monotonic() - start, 1),
    )


def format_score(row: Score) -> str:
    """Returns a score as one table row."""
    sizes = (
        f"{row.family:7s} {row.kind:8s} {row.lines:5d} {row.prompt_tokens:6d} "
        f"{row.trace_tokens:5d}"
    )
    share = 100 * row.correct / row.problems
    interval = f"[{100 * row.low:5.1f}, {100 * row.high:5.1f}]"
    exact = 100 * row.exact / row.problems
    return (
        f"{sizes}  {row.correct:4d}/{row.problems:<4d} {share:5.1f} % {interval}  "
        f"exact {exact:5.1f} %  {row.seconds:.0f} s"
    )


def parse_task(text: str) -> tuple[str, int]:
    """Reads ``family:lines``."""
    family, _, lines = text.partition(":")
    if family not in FAMILIES or not lines.isdigit():
        raise argparse.ArgumentTypeError(
            f"expected FAMILY:LINES with a family of {sorted(FAMILIES)}, got {text!r}"
        )
    return family, int(lines)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("tasks", type=parse_task, nargs="*", metavar="FAMILY:LINES")
    parser.add_argument("--problems", type=int, default=200, help="per task")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--template", type=int, default=0, help="of the tasks named")
    parser.add_argument("--recent", type=int, default=0, help="tokens; 0: full cache")
    parser.add_argument("--sinks", type=int, default=4, help="tokens")
    parser.add_argument("--keep-prompt", action="store_true")
    parser.add_argument("--batch-rows", type=int, default=50)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=new_file, help="file to write the scores to")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Scores a checkpoint on the tasks of the command line."""
    args = parse_args(argv)
    torch.set_num_threads(args.threads)
    tokenizer = AutoTokenizer.from_pretrained(args.checkpoint)
    model = AutoModelForCausalLM.from_pretrained(args.checkpoint, dtype=torch.float32)
    rule = CacheRule(args.recent, args.sinks, args.keep_prompt)
    tasks = [Task(family, lines, args.template) for family, lines in args.tasks]
    if not tasks:
        note = json.loads((args.checkpoint / "training.json").read_text())
        tasks = report_tasks(note["lines"])
    print("family  kind     lines prompt trace  correct     accuracy [95 % interval]")
    rows = []
    for task in tasks:
        problems = task.problems(args.problems, args.first_seed)
        row = score(model.eval(), tokenizer, problems, rule, args.batch_rows)
        rows.append(replace(row, template=task.template, kind=task.kind))
        print(format_score(rows[-1]), flush=True)
    if args.json:
        note = {"command": sys.argv[1:], "rule": asdict(rule)}
        note["scores"] = [asdict(row) for row in rows]
        args.json.write_text(json.dumps(note, indent=2, default=str) + "\n")


if __name__ == "__main__":
    main()
