"""Checks that our loop gives the same texts as kvpress' own pipeline.

    PEER/bin/python -m benchmarks.peer.check [--model FOLDER] [--tasks copy:48 hot:40]

Run it in the peer's environment. The pipeline uses kvpress' own presses, our loop the
watched ones; the sorted rows have no counterpart.
"""

import argparse
import sys
from pathlib import Path

import torch
from kvpress import KVPressTextGenerationPipeline
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from benchmarks.accuracy.questions import questions_of
from benchmarks.peer.catalogue import FULL, PRESSES
from benchmarks.peer.decoding import answer
from benchmarks.peer.presses import build
from benchmarks.peer.prompts import Prompts
from benchmarks.peer.tracking import Tracker

OPTIONS: dict[str, dict] = {name: {} for name in PRESSES}
OPTIONS |= {"snapkv": {"window_size": 32}, "pyramid-snapkv": {"window_size": 32}}
OPTIONS |= {"lagkv": {"lag_size": 32}}


def main() -> int:
    """Print a line per row and question; return 1 if a text differs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="reasoner/checkpoint")
    parser.add_argument("--tasks", nargs="+", default=["copy:48", "hot:40"])
    parser.add_argument("--budget", type=int, default=128)
    parser.add_argument("--interval", type=int, default=64)
    args = parser.parse_args()
    torch.set_num_threads(1)
    disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    prompts = Prompts(tokenizer)
    pipeline = KVPressTextGenerationPipeline(model=model, tokenizer=tokenizer)
    different = 0
    for row in (FULL, *PRESSES):
        for task in args.tasks:
            (question,) = questions_of(task, 1, 0, Path())
            limits = args.budget, args.interval, OPTIONS
            try:
                theirs = pipeline(
                    "",
                    question=question.prompt,
                    press=build(row, *limits, None),
                    max_new_tokens=question.max_tokens,
                )["answer"]
            except AssertionError as error:
                print(f"{row:16} {task:10} refused: {error}")
                continue
            ids = prompts.ids(question.prompt)
            press = build(row, *limits, Tracker())
            ours = answer(model, press, ids, prompts.start, question.max_tokens)
            same = prompts.text(ours["tokens"]) == theirs
            different += not same
            length = len(ours["tokens"])
            print(f"{row:16} {task:10} {'same' if same else 'DIFFERENT'}, {length}")
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main())
