"""`calibrate epikv-labels`: finds the tokens that answers depend on.

Windows of 32 tokens, one every 16, are overwritten one at a time. If the model then
gives another answer, the window's tokens are labelled important.

Source: EpiKV (arXiv 2606.26472) section 3 and
https://github.com/stevenkolawole/epiphany-kv-cache/blob/d424208/scripts/label_importance.py.
Deviations: each label names its filler. Theirs is the end token wherever a model pads
with it, which changes more answers than other fillers do.
"""

import argparse
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm
from vllm import LLM, SamplingParams, TokensPrompt

from vllm_kvpolicy.calibrate.epikv_files import (
    Trace,
    answer_start,
    append,
    boxed_answer,
    read_lines,
    resume,
    same_answer,
)
from vllm_kvpolicy.commands.outputs import new_file

PROMPT, ANSWER = 1, -1  # labels of tokens outside all windows
FILLERS = ("eos", "pad", "random")
# Takes contexts and returns the text with which the model continues each.
Continue = Callable[[list[list[int]]], list[str]]


@dataclass(frozen=True)
class Windows:
    """Which spans of tokens are overwritten, and with what.

    Args:
        size: tokens per window.
        stride: tokens from one window to the next.
        filler: a name in FILLERS.
        token: fills the window; None for tokens drawn from `vocabulary`, a new draw
            for each window and the same in each run.
        vocabulary: tokens to draw from.

    Example:
        With size 4 and stride 2, `spans(10, 15)` is 10 to 13, 12 to 14 and 14 to 14.
    """

    size: int = 32
    stride: int = 16
    filler: str = "eos"
    token: int | None = None
    vocabulary: Sequence[int] = ()

    def spans(self, first: int, end: int) -> list[range]:
        """Return the windows in [first, end); the last ones are cut at `end`."""
        starts = range(first, end, self.stride)
        return [range(start, min(start + self.size, end)) for start in starts]

    def without(self, tokens: Sequence[int], span: range, end: int) -> list[int]:
        """Return the tokens before `end` with one window overwritten."""
        if self.token is None:
            draw = random.Random(f"window {span.start}")
            fill = [draw.choice(self.vocabulary) for _ in span]
        else:
            fill = [self.token] * len(span)
        return [*tokens[: span.start], *fill, *tokens[span.stop : end]]


def label(
    trace: Trace, pieces: Sequence[str], windows: Windows, complete: Continue
) -> Trace:
    """Label the tokens of a trace.

    Args:
        trace: a trace with its `ground_truth`.
        pieces: text of each of its tokens.
        windows: the spans to overwrite.
        complete: the model.

    Returns:
        The trace with `importance`, and with `label_stats`: counts behind the labels.
    """
    tokens, prompt_len = trace["token_ids"], trace["prompt_len"]
    end = answer_start(pieces, prompt_len)
    spans = windows.spans(prompt_len, end)
    texts = complete([windows.without(tokens, span, end) for span in spans])
    importance = [PROMPT] * prompt_len + [0] * (end - prompt_len)
    importance += [ANSWER] * (len(tokens) - end)
    num_changed = 0
    for span, text in zip(spans, texts, strict=True):
        if not same_answer(boxed_answer(text), trace["ground_truth"]):
            num_changed += 1
            importance[span.start : span.stop] = [1] * len(span)
    stats = {
        "answer_start": end,
        "filler": windows.filler,
        "windows": len(spans),
        "changed": num_changed,
    }
    return {**trace, "importance": importance, "label_stats": stats}


def label_all(
    traces: Sequence[Trace],
    output: Path,
    windows: Windows,
    pieces_of: Callable[[Sequence[int]], list[str]],
    complete: Continue,
) -> int:
    """Label the correctly answered traces that are not in the file yet.

    Args:
        traces: in any order.
        output: file that labelled traces are appended to, one by one.
        windows: the spans to overwrite.
        pieces_of: returns the text of each token.
        complete: the model.

    Returns:
        The number of traces labelled in this call.
    """
    done = {tuple(trace["token_ids"]) for trace in resume(output)}
    due = [
        trace
        for trace in traces
        if trace.get("correct", True) and tuple(trace["token_ids"]) not in done
    ]

    def labelled() -> Iterator[Trace]:
        for trace in tqdm(due, unit=" traces", desc="labels"):
            yield label(trace, pieces_of(trace["token_ids"]), windows, complete)

    append(output, labelled())
    return len(due)


def _windows(given: argparse.Namespace, tokenizer: Any) -> Windows:
    """Return the windows set on the command line.

    Raises:
        ValueError: the tokenizer has no token for the filler.
    """
    tokens = {"eos": tokenizer.eos_token_id, "pad": tokenizer.pad_token_id}
    token = tokens.get(given.filler)
    if token is None and given.filler != "random":
        raise ValueError(f"filler: the tokenizer has no {given.filler} token")
    special = set(tokenizer.all_special_ids)
    vocabulary = [token for token in range(len(tokenizer)) if token not in special]
    return Windows(given.window, given.stride, given.filler, token, vocabulary)


def add_commands(commands: Any) -> None:
    """Add the subcommand `epikv-labels`."""
    parser = commands.add_parser(
        "epikv-labels",
        help="step 2 for epikv: find the tokens that answers depend on",
        description="Label each token of the traces by whether the answer depends "
        "on it. Resumes an interrupted run.",
    )
    add = parser.add_argument
    add("--model", required=True, help="folder or name, as for vLLM")
    add("--traces", required=True, type=Path, help="JSONL to read")
    add("--output", required=True, type=new_file, help="JSONL to write")
    add(
        "--window",
        type=int,
        default=32,
        help="tokens overwritten at a time (default: 32)",
    )
    add(
        "--stride",
        type=int,
        default=16,
        help="distance between the starts of two windows in tokens (default: 16)",
    )
    add(
        "--filler",
        choices=FILLERS,
        default="eos",
        help="what to overwrite windows with (default: eos)",
    )
    add(
        "--max-tokens",
        type=int,
        default=512,
        help="maximum tokens per new answer (default: 512)",
    )
    parser.set_defaults(run=partial(_run, parser))


def _run(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    """Append a labelled trace to the output for each one that is not in it yet."""
    try:
        traces = read_lines(given.traces)
    except ValueError as error:
        parser.error(str(error))
    llm = LLM(given.model)
    tokenizer = llm.get_tokenizer()
    params = SamplingParams(temperature=0, max_tokens=given.max_tokens)

    def complete(contexts: list[list[int]]) -> list[str]:
        prompts = [TokensPrompt(prompt_token_ids=tokens) for tokens in contexts]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [output.outputs[0].text for output in outputs]

    def pieces_of(tokens: Sequence[int]) -> list[str]:
        return [tokenizer.decode([token]) for token in tokens]

    windows = _windows(given, tokenizer)
    number = label_all(traces, given.output, windows, pieces_of, complete)
    print(f"wrote {given.output}: {number} new labelled traces")
