"""`calibrate epikv-collect`: answers problems and records each layer's steps.

A *step* is how far a layer's output moves from one token to the next. Stock vLLM
answers a batch of problems greedily, in this process and without compiled graphs. Then
each answer passes the model once more, alone and as a prompt, and hooks on the decoder
layers record the steps.

Source: EpiKV (arXiv 2606.26472) section 3 and
https://github.com/stevenkolawole/epiphany-kv-cache/blob/d424208/scripts/collect_traces.py.
Deviations: none.
"""

import argparse
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from vllm import EngineArgs, SamplingParams, TokensPrompt
from vllm.outputs import RequestOutput
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from vllm_kvpolicy.calibrate.epikv_files import (
    PROBLEM_KEYS,
    STEP_SIGNAL,
    Trace,
    append,
    boxed_answer,
    read_lines,
    resume,
    same_answer,
)
from vllm_kvpolicy.commands.outputs import new_file
from vllm_kvpolicy.kernels.token_signals import hidden_change
from vllm_kvpolicy.policies.model_parts import decoder_layers

INSTRUCTION = (
    "Reason step by step, and put your final answer within \\boxed{}."  # system prompt
)
BATCH = 64  # problems answered together; an interrupted run loses at most these


class StepReader:
    """Records the steps of all layers for one sequence at a time, by hooks.

    Args:
        model: a model of vLLM that runs eagerly, all of it in this process.
        num_layers: its decoder layers.

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


def start_engine(model: str, **engine_args: Any) -> LLMEngine:
    """Start stock vLLM in this process.

    Args:
        model: folder or name, as for vLLM.
        engine_args: further arguments of vLLM's engine, such as `dtype`.
    """
    config = EngineArgs(
        model=model, enforce_eager=True, enable_prefix_caching=False, **engine_args
    ).create_engine_config()
    # The engine's class methods may start the model in another process.
    return LLMEngine(config, UniProcExecutor, log_stats=False)


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
        engine: see `start_engine`.
        problems: with `problem` and `ground_truth`; other keys are copied to the trace.
        max_tokens: most tokens of an answer.
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


def add_commands(commands: Any) -> None:
    """Add the subcommand `epikv-collect`."""
    parser = commands.add_parser(
        "epikv-collect",
        help="step 1 for epikv: answer problems and record how each layer's output "
        "changes",
        description="Answer problems and record how far each layer's output moves "
        "at each token. Resumes an interrupted run.",
    )
    add = parser.add_argument
    add("--model", required=True, help="folder or name, as for vLLM")
    add("--problems", required=True, type=Path, help="JSONL to read")
    add("--output", required=True, type=new_file, help="JSONL to write")
    add(
        "--max-tokens",
        type=int,
        default=8192,
        help="maximum tokens per answer (default: 8192)",
    )
    parser.set_defaults(run=partial(_run, parser))


def _run(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    """Append a trace to the output for each problem that is not in it yet."""
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
