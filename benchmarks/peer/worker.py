"""Answers questions on the peer: one JSON line in, one out.

PEER/bin/python -m benchmarks.peer.worker
"""

import json
import platform
import sys
from importlib.metadata import version
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from benchmarks.peer.decoding import answer
from benchmarks.peer.forcing import read
from benchmarks.peer.presses import build, build_once
from benchmarks.peer.tracking import Tracker

PACKAGES = ("kvpress", "transformers", "torch")


def load(settings: dict[str, Any]) -> Any:
    """Load the model and warm it up.

    Args:
        settings: `model`, a folder; `dtype`, torch's name; `threads`.
    """
    disable_progress_bar()
    torch.set_num_threads(settings["threads"])
    model = AutoModelForCausalLM.from_pretrained(
        settings["model"], dtype=getattr(torch, settings["dtype"])
    ).eval()
    answer(model, None, [0] * 8, 2, 8)
    return model


def reply(model: Any, asked: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to one line, or kvpress' failed assertion.

    A line with `at` asks for the losses of a text, see `forcing.read`; any other for an
    answer, see `decoding.answer`.
    """
    tracker = Tracker()
    row, budget, options = (asked[name] for name in ("row", "budget", "options"))
    try:
        if "at" in asked:
            once = build_once(row, budget, asked["at"], options, tracker)
            said = read(model, once, asked["token_ids"], asked["at"])
        else:
            question = asked["prompt"], asked["start"], asked["max_tokens"]
            press = build(row, budget, asked["interval"], options, tracker)
            said = answer(model, press, *question)
    except AssertionError as error:  # how its presses refuse; the rest is a fault
        return {"refused": f"{type(error).__name__}: {error}"}
    return said | tracker.figures()


def main() -> None:
    """Answer lines until the input ends."""
    replies, sys.stdout = sys.stdout, sys.stderr
    model = None
    for line in sys.stdin:
        asked = json.loads(line)
        if model is None:
            model = load(asked)
            said = {name: version(name) for name in PACKAGES}
            said["python"] = platform.python_version()
            said["attention"] = model.config._attn_implementation
        else:
            said = reply(model, asked)
        replies.write(json.dumps(said) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
