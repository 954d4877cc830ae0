"""Makes the traces of EpiKV's calibration: answers, layers' steps, and labels.

`python -m training epikv-collect` answers problems and records steps. A *step* is how
far a layer's output moves from one token to the next. Stock vLLM answers a batch of
problems greedily, in this process and without compiled graphs. Then each answer passes
the model once more, alone and as a prompt, and hooks on the decoder layers record the
steps.

`python -m training epikv-labels` finds the tokens that answers depend on. Windows of 32
tokens, one every 16, are overwritten one at a time. If the model then gives another
answer, the window's tokens are labelled important.

Source: EpiKV (arXiv 2606.26472) section 3 and
https://github.com/stevenkolawole/epiphany-kv-cache/blob/d424208/scripts, there
`collect_traces.py` and `label_importance.py`. Deviations: each label names its filler.
Theirs is the end token wherever a model pads with it, which changes more answers than
other fillers do.
"""

import argparse
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.outputs import RequestOutput
from vllm.v1.engine.llm_engine import LLMEngine

from training import option
from training.epikv_files import (
    PROBLEM_KEYS,
    STEP_SIGNAL,
    Trace,
    answer_start,
    append,
    boxed_answer,
    read_lines,
    resume,
    same_answer,
)
from training.queries import start_engine
from vllm_kvpolicy.commands.outputs import new_file
from vllm_kvpolicy.policies.hooks import decoder_layers
from vllm_kvpolicy.policies.scorers._signals import hidden_change

INSTRUCTION = (
    "Reason step by step, and put your final answer within \\boxed{}."  # system prompt
)
BATCH = 64  # problems answered together; an interrupted run loses at most these
PROMPT, ANSWER = 1, -1  # labels of tokens outside all windows
FILLERS = ("eos", "pad", "random")
# Takes contexts and returns the text with which the model continues each.
Continue = Callable[[list[list[int]]], list[str]]


class StepReader:
    """Records the steps of all layers for one sequence at a time, by hooks.

    Args:
        model: a model of vLLM that runs eagerly, all of it in this process.

    Raises:
        ValueError: the layers cannot be found.
    """

    def __init__(self, model: torch.nn.Module, num_layers: int) -> None:
        self._steps: list[list[torch.Tensor]] = [[] for _ in range(num_layers)]
        self._last: list[torch.Tensor | None] = [None] * num_layers
        for index, layer in enumerate(decoder_layers(model, num_layers)):
            layer.register_forward_hook(partial(self._on_output, index))

    def _on_output(self, index: int, _layer: Any, _args: Any, output: Any) -> None:
        hidden, residual = output if isinstance(output, tuple) else (output, None)
        state = hidden.clone() if residual is None else hidden + residual
        last = self._last[index]
        before = torch.cat([state[:1] if last is None else last, state[:-1]])
        self._steps[index].append(hidden_change(state, before))
        self._last[index] = state[-1:]

    def take(self) -> dict[str, list[float]]:
        """Return the steps of the sequence by signal name, and start a new one."""
        rows = [torch.cat(chunks).tolist() for chunks in self._steps]
        self.forget()
        return {f"{STEP_SIGNAL}{index}": row for index, row in enumerate(rows)}

    def forget(self) -> None:
        """Discard the current sequence and start a new one."""
        self._steps = [[] for _ in self._steps]
        self._last = [None] * len(self._last)


def run(
    engine: LLMEngine, prompts: Sequence[Sequence[int]], max_tokens: int
) -> list[RequestOutput]:
    """Continue prompts greedily and return the outputs in the order of the prompts."""
    longest = engine.model_config.max_model_len
    for number, prompt in enumerate(prompts):
        # One token less than fits, because the whole becomes a prompt afterwards.
        room = max(1, min(max_tokens, longest - len(prompt) - 1))
        params = SamplingParams(temperature=0, max_tokens=room)
        tokens = TokensPrompt(prompt_token_ids=list(prompt))
        engine.add_request(str(number), tokens, params)
    finished = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            finished[int(output.request_id)] = output
    return [finished[number] for number in range(len(prompts))]


def collect(
    engine: LLMEngine, problems: Sequence[dict[str, Any]], max_tokens: int
) -> Iterator[Trace]:
    """Answer problems and yield a trace with the steps of each answer.

    Args:
        problems: with `problem` and `ground_truth`; other keys are copied to the trace.
    """
    num_layers = engine.model_config.hf_text_config.num_hidden_layers
    (reader,) = engine.apply_model(partial(StepReader, num_layers=num_layers))
    tokenizer = engine.get_tokenizer()
    for start in range(0, len(problems), BATCH):
        batch = problems[start : start + BATCH]
        prompts = [_prompt(tokenizer, problem["problem"]) for problem in batch]
        outputs = run(engine, prompts, max_tokens)
        for problem, prompt, output in zip(batch, prompts, outputs, strict=True):
            answer = output.outputs[0]
            tokens = [*prompt, *answer.token_ids]
            reader.forget()
            run(engine, [tokens], 1)
            yield {
                **problem,
                "token_ids": tokens,
                "prompt_len": len(prompt),
                "correct": same_answer(
                    boxed_answer(answer.text), problem["ground_truth"]
                ),
                "signals": reader.take(),
            }


def _prompt(tokenizer: Any, problem: str) -> list[int]:
    messages = [
        {"role": "system", "content": INSTRUCTION},
        {"role": "user", "content": problem},
    ]
    text = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    return tokenizer.encode(text, add_special_tokens=False)


def collect_main(arguments: Sequence[str]) -> None:
    """Append a trace to the output for each problem that is not in it yet."""
    parser = argparse.ArgumentParser(
        prog="python -m training epikv-collect",
        description="Answer problems and record how far each layer's output moves "
        "at each token. Resumes an interrupted run.",
    )
    add = parser.add_argument
    add("--model", required=True, help="folder or name, as for vLLM")
    add("--problems", required=True, type=Path, help="JSONL to read")
    add("--output", required=True, type=new_file, help="JSONL to write")
    option(parser, "--max-tokens", int, 8192, "maximum tokens per answer")
    given = parser.parse_args(arguments)
    try:
        problems = read_lines(given.problems, PROBLEM_KEYS)
        done = {trace["problem"] for trace in resume(given.output)}
    except ValueError as error:
        parser.error(str(error))
    due = [problem for problem in problems if problem["problem"] not in done]
    engine = start_engine(given.model)
    try:
        traces = collect(engine, due, given.max_tokens)
        append(given.output, tqdm(traces, total=len(due), unit=" traces"))
    finally:
        engine.engine_core.shutdown()
    print(f"wrote {given.output}: {len(due)} new traces, {len(done)} from before")


@dataclass(frozen=True)
class Windows:
    """Which spans of tokens are overwritten, and with what.

    Args:
        stride: tokens from one window to the next.
        filler: a name in FILLERS.
        token: fills the window; None for tokens drawn from `vocabulary`, a new draw
            for each window and the same in each run.

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


def _labels_options(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options, and the traces as `lines`; a wrong one ends the process."""
    parser = argparse.ArgumentParser(
        prog="python -m training epikv-labels",
        description="Label each token of the traces by whether the answer depends "
        "on it. Resumes an interrupted run.",
    )
    add = parser.add_argument
    add("--model", required=True, help="folder or name, as for vLLM")
    add("--traces", required=True, type=Path, help="JSONL to read")
    add("--output", required=True, type=new_file, help="JSONL to write")
    option(parser, "--window", int, 32, "tokens overwritten at a time")
    told = "distance between the starts of two windows in tokens"
    option(parser, "--stride", int, 16, told)
    told = "what to overwrite windows with"
    option(parser, "--filler", str, "eos", told, choices=FILLERS)
    option(parser, "--max-tokens", int, 512, "maximum tokens per new answer")
    given = parser.parse_args(arguments)
    try:
        given.lines = read_lines(given.traces)
    except ValueError as error:
        parser.error(str(error))
    return given


def labels_main(arguments: Sequence[str]) -> None:
    """Append a labelled trace to the output for each one that is not in it yet."""
    given = _labels_options(arguments)
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
    number = label_all(given.lines, given.output, windows, pieces_of, complete)
    print(f"wrote {given.output}: {number} new labelled traces")
