"""Finds the tokens that answers depend on.

    python -m vllm_kvpolicy.calibrate.epikv_labels

Windows of 32 tokens, one every 16, are written over; if the model then gives another
answer, the tokens of the window are important.
Source: EpiKV (arXiv 2606.26472) section 3 and
https://github.com/stevenkolawole/epiphany-kv-cache/blob/d424208/scripts/label_importance.py.
Deviations: the filler is named in each label; theirs is the end token wherever a model
pads with it, which changes more answers than other fillers do.
"""

import argparse
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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

PROMPT, ANSWER = 1, -1  # labels of tokens that no window covers
FILLERS = ("eos", "pad", "random")
# Takes contexts, returns the text that the model puts behind each.
Continue = Callable[[list[list[int]]], list[str]]


@dataclass(frozen=True)
class Windows:
    """Where tokens are written over, and with what.

    Args:
        size: tokens per window.
        stride: tokens from one window to the next.
        filler: a name in FILLERS.
        token: what stands in the window; None for tokens drawn from `vocabulary`,
            another draw for each window, the same in each run.
        vocabulary: tokens to draw from.
    """

    size: int = 32
    stride: int = 16
    filler: str = "eos"
    token: int | None = None
    vocabulary: Sequence[int] = ()

    def spans(self, first: int, end: int) -> list[range]:
        """Return the windows between two tokens; the last ones end there."""
        starts = range(first, end, self.stride)
        return [range(start, min(start + self.size, end)) for start in starts]

    def without(self, tokens: Sequence[int], span: range, end: int) -> list[int]:
        """Return the tokens before `end`, those of one window written over."""
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
        windows: what is written over.
        complete: the model.

    Returns:
        The trace with `importance`, and `label_stats` about how it came about.
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
    """Label the traces with a right answer that are not in the file yet.

    Args:
        traces: in any order.
        output: file that the labelled traces are written to, one by one.
        windows: what is written over.
        pieces_of: returns the text of each token.
        complete: the model.

    Returns:
        How many were labelled now.
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
    """Return the windows that the command line asks for.

    Raises:
        ValueError: the tokenizer has no such token.
    """
    tokens = {"eos": tokenizer.eos_token_id, "pad": tokenizer.pad_token_id}
    token = tokens.get(given.filler)
    if token is None and given.filler != "random":
        raise ValueError(f"filler: the tokenizer has no {given.filler} token")
    special = set(tokenizer.all_special_ids)
    vocabulary = [token for token in range(len(tokenizer)) if token not in special]
    return Windows(given.window, given.stride, given.filler, token, vocabulary)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; `arguments` are those of the process unless given."""
    parser = argparse.ArgumentParser(
        prog="python -m vllm_kvpolicy.calibrate.epikv_labels",
        description="Label the tokens of traces by what the answer depends on. Goes on "
        "where an earlier run stopped.",
    )
    parser.add_argument("--model", required=True, help="folder or name, as for vLLM")
    parser.add_argument("--traces", required=True, type=Path, help="JSONL to read")
    parser.add_argument("--output", required=True, type=Path, help="JSONL to write")
    parser.add_argument("--window", type=int, default=32, help="tokens written over")
    parser.add_argument("--stride", type=int, default=16, help="tokens between windows")
    parser.add_argument("--filler", choices=FILLERS, default="eos")
    parser.add_argument("--max-tokens", type=int, default=512, help="of a new answer")
    given = parser.parse_args(arguments)
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

    label_all(traces, given.output, _windows(given, tokenizer), pieces_of, complete)


if __name__ == "__main__":
    main()
