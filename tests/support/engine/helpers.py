"""Starts engines and drives them step by step: the one place that knows how."""

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from support.engine.collector import keep_imports_frozen
from support.engine.passes import Cut, Passes
from vllm_kvpolicy.config import KVPolicyConfig
from vllm_kvpolicy.config_keys import ALWAYS
from vllm_kvpolicy.events import Footprint, request_phase
from vllm_kvpolicy.observe.trace_files import (
    EventRecord,
    join_ranks,
    read_event,
    whole_run,
)
from vllm_kvpolicy.policies.names import parse

FIXED: dict[str, Any] = {"events": ALWAYS}
"""What tests take for granted: events come at positions that they can name."""
BLOCK = 32
POLICIES = ("streaming", "tova", "snapkv", "ams-tova", "ams-snapkv")
MOVERS = ("identity", "holes")
TOP_LOGPROBS = 20
MAX_STEPS = 5000
OWN = "own"
FIRST_TOKEN, LAST_TOKEN = 3, 98  # the tiny model's characters

Prompt = list[int]


@dataclass(frozen=True)
class Job:
    """One request and when it comes.

    Args:
        name: unique within a run.
        max_tokens: tokens to generate; the end token is ignored.
        arrives: engine step before which the request is added.
        aborted: number of generated tokens after which it is aborted, None for never.
        prompt_logprobs: ask for log-probabilities of the prompt too.
        lora: the adapter's request of vLLM's, None for the plain model.
        priority: the more urgent, the smaller.
    """

    name: str
    prompt: Prompt
    max_tokens: int
    arrives: int = 0
    aborted: int | None = None
    extra_args: dict[str, Any] | None = None
    prompt_logprobs: bool = False
    lora: Any = None
    priority: int = 0


class Record(EventRecord):
    """One event as the worker recorded it, as oracles read it."""

    def survivors_of(self, layer: int, head: int) -> np.ndarray:
        """Return the positions in a head's global pool, ascending."""
        return _ascending(self.survivors[layer, head])

    def selected_of(self, layer: int, head: int) -> np.ndarray:
        """Return the positions that the policy chose for a head, ascending."""
        return _ascending(self.selected[layer, head])


def _ascending(padded: np.ndarray) -> np.ndarray:
    return np.sort(padded[padded >= 0])


@dataclass
class Result:
    """What one request gave.

    Args:
        logprobs: per generated token, token id to log-probability.
        prompt_logprobs: the same for prompt tokens after the first, empty if not asked.
        passes: the request's events, one list for each time it was (re)computed.
        record: of the same events, what the scheduler has told the worker.
        computed_in: per generated token, the index of the pass that it comes from.
        output: vLLM's own, as a user gets it.
    """

    job: Job
    tokens: Prompt
    logprobs: list[dict[int, float]]
    prompt_logprobs: list[dict[int, float]]
    passes: list[list[Record]] = field(default_factory=list)
    record: list[list[Cut]] = field(default_factory=list)
    computed_in: list[int] = field(default_factory=list)
    output: Any = None

    @property
    def all_tokens(self) -> Prompt:
        return self.job.prompt + self.tokens

    @property
    def events(self) -> list[Record]:
        """Events of the last time that it was computed."""
        return self.passes[-1] if self.passes else []

    def check_kept(self, other: "Result") -> None:
        """Check that another run said and kept the same, event by event."""
        assert self.tokens == other.tokens
        for ours, theirs in zip(self.events, other.events, strict=True):
            assert ours.position == theirs.position
            assert np.array_equal(ours.survivors, theirs.survivors)

    def up_to(self, number: int) -> "Result":
        """Return it as it was before its preemption of that number, counted from 1."""
        return replace(self, passes=self.passes[:number], record=self.record[:number])


@dataclass
class Run:
    """What one run of an engine gave.

    Args:
        results: finished requests by name.
        preemptions: requests that lost their blocks, counted each time.
        counters: the engine's own, since it started; none of stock vLLM.
    """

    results: dict[str, Result]
    steps: int
    preemptions: int
    counters: dict[str, float] = field(default_factory=dict)

    @property
    def tokens(self) -> dict[str, Prompt]:
        """Generated tokens by name."""
        return {name: result.tokens for name, result in self.results.items()}

    @property
    def events(self) -> list[Record]:
        """Events of all requests, of the last time that each was computed."""
        return [event for each in self.results.values() for event in each.events]

    @property
    def calls(self) -> list[Cut]:
        """What the scheduler has told the worker of events, of all passes."""
        return [cut for each in self.results.values() for cut in sum(each.record, [])]

    def check_kept(self, other: "Run") -> None:
        """Check that another run of the same requests said and kept the same."""
        for name, result in other.results.items():
            self.results[name].check_kept(result)

    def check_moved(self, heads: tuple[int, int] = (2, 2)) -> None:
        """Check that events of [L, H] heads drop nothing and move half of all tokens.

        A mover that moves little would prove little.
        """
        assert not self.counters["tokens_dropped"]
        passes = [each for result in self.results.values() for each in result.passes]
        moved = [event.moved for events in passes for event in events]
        assert sum(moved) / len(moved) >= 0.5
        assert {event.survivors.shape[:2] for event in self.events} == {heads}

    def check_answers(self, stock: "Run", most: float = 1e-3) -> None:
        """Check that tokens are those of a stock run, log-probabilities within `most`.

        Prompts of the jobs must differ, so that no two answers are alike. Aborts fall
        on whole steps, so lengths agree, too.
        """
        assert self.tokens == stock.tokens
        answers = {tuple(tokens) for tokens in stock.tokens.values()}
        assert len(answers) == len(stock.tokens)
        for name, result in self.results.items():
            pairs = zip(result.logprobs, stock.results[name].logprobs, strict=True)
            for token, (ours, theirs) in zip(result.tokens, pairs, strict=True):
                assert abs(ours[token] - theirs[token]) < most


def make_prompt(seed: int, length: int) -> Prompt:
    rng = random.Random(seed)
    return [rng.randint(FIRST_TOKEN, LAST_TOKEN) for _ in range(length)]


def make_jobs(
    lengths: Iterable[int], max_tokens: int, seed: int = 0, **fields: Any
) -> list[Job]:
    """Return one job per prompt length; `fields` are further fields of Job."""
    return [
        Job(f"r{index}", make_prompt(seed * 1000 + index, length), max_tokens, **fields)
        for index, length in enumerate(lengths)
    ]


def jobs_of(
    names: Iterable[str], lengths: Iterable[int], max_tokens: int, **fields: Any
) -> list[Job]:
    """Return a job per policy and prompt length, named `POLICY LENGTH`.

    All policies answer the same prompts; `OWN` stands for the server's own policy, and
    `fields` are further fields of Job.
    """
    names = list(names)
    return [
        Job(
            f"{name} {length}",
            make_prompt(length, length),
            max_tokens,
            extra_args=None if name == OWN else {"kv_policy": name},
            **fields,
        )
        for length in lengths
        for name in names
    ]


def one_job_each(
    names: Sequence[str],
    lengths: Sequence[int],
    max_tokens: int,
    seed: int = 7000,
    make: Callable[[int, int], Prompt] = make_prompt,
    **fields: Any,
) -> list[Job]:
    """Return a job per policy, named like it, with a prompt of its own.

    Args:
        lengths: of prompts, again and again.
        seed: of the first prompt; the others follow by one.
        make: makes a prompt of a seed and a length.
        **fields: further fields of Job.
    """
    return [
        Job(
            name,
            make(seed + number, lengths[number % len(lengths)]),
            max_tokens,
            extra_args={"kv_policy": name},
            **fields,
        )
        for number, name in enumerate(names)
    ]


GROUP_SIZE = 2  # of the tiny model


def footprint_of(
    values: dict[str, Any], job: Job, block_size: int = BLOCK
) -> Footprint:
    """Return when a job has events on a server, and what it holds between them.

    Args:
        values: the plain form of the server's configuration.
        job: with a policy, the server's or one of its own.
        block_size: N of full attention.
    """
    config, phase = config_of(values), request_phase(job.prompt)
    config = config.with_request(job.extra_args or {}, block_size)
    return config.footprint(len(job.prompt), block_size, GROUP_SIZE, phase)


def most_hit(
    values: dict[str, Any], job: Job, sizes: tuple[int, int] = (BLOCK, BLOCK)
) -> int:
    """Return the tokens that a job takes from a warm prefix cache by the rules alone.

    A prompt's last token is computed, and so are those that the window of the first
    event captures. See `footprint_of`; the job names its policy.

    Args:
        sizes: tokens per superblock of full attention, and of all groups' largest.
    """
    name, last = job.extra_args["kv_policy"], len(job.prompt)
    if name != "none":
        if parse(name).measures_tokens:
            return 0
        events = footprint_of(values, job, sizes[0]).events
        last = min(events.next_event(1) - events.window_tokens, last)
    return (last - 1) // sizes[1] * sizes[1]


def config_of(values: dict[str, Any]) -> KVPolicyConfig:
    """Return the configuration of an engine of this module; see `Engine`."""
    return KVPolicyConfig.from_dict(FIXED | values)


def engine_arguments(
    model: Path,
    policy: dict[str, Any] | None = None,
    trace: Path | None = None,
    num_blocks: int = 400,
    **changes: Any,
) -> dict[str, Any]:
    """Return the arguments of vLLM's LLM; see `Engine`."""
    if policy is not None and trace is not None:
        policy = {**policy, "trace_dir": str(trace)}
    if policy is not None:
        policy = FIXED | policy
    arguments: dict[str, Any] = {
        "model": str(model),
        "dtype": "float32",
        "max_model_len": 2048,
        "max_num_seqs": 16,
        "block_size": BLOCK,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "kv_cache_memory_bytes": 64 * 2**20,
        "num_gpu_blocks_override": num_blocks,
        "logprobs_mode": "raw_logprobs",
        "additional_config": {} if policy is None else {"kv_policy": policy},
    }
    return {**arguments, **changes}


class Engine:
    """A vLLM engine in this process, with or without a policy.

    Args:
        policy: the plain form of the policy's configuration, None for stock vLLM;
            events are at fixed positions unless it says otherwise.
        trace: record events in this folder.
        num_blocks: superblocks in the pool, vLLM's null block included.
        foresees: requests enter by the forecast; otherwise as vLLM lets them in, so
            that a small pool makes them preempt each other.
        **changes: further arguments of vLLM's LLM.
    """

    def __init__(
        self,
        model: Path,
        policy: dict[str, Any] | None = None,
        trace: Path | None = None,
        num_blocks: int = 400,
        foresees: bool = True,
        **changes: Any,
    ) -> None:
        from vllm import LLM

        self.llm = LLM(**engine_arguments(model, policy, trace, num_blocks, **changes))
        keep_kernels()
        self.trace = trace
        self._read: set[Path] = set()
        self._passes = Passes()
        self._passes.watch(self.scheduler)
        if not foresees:
            self.admit_as_vllm_does()

    # -- inside the engine --------------------------------------------------------

    @property
    def core(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def scheduler(self) -> Any:
        return self.core.scheduler

    @property
    def worker(self) -> Any:
        return self.core.model_executor.driver_worker.worker

    @property
    def runtime(self) -> Any:
        """The worker's half of the policy."""
        return self.worker.kv_policy_runtime

    @property
    def num_free(self) -> int:
        """Free superblocks in the pool."""
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    @property
    def num_usable(self) -> int:
        """Superblocks that requests can have: all but vLLM's null block."""
        return self.scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1

    def counters(self) -> dict[str, float]:
        return self.scheduler.kv_policy_counters.read()

    def admit_as_vllm_does(self) -> None:
        """Let requests in when their prompt fits: where the pool is full, preempt."""
        admission = getattr(self.scheduler, "kv_policy_entry", None)
        if admission is not None:
            admission.admits = lambda request, computed, num_new, *_: num_new
            admission.allowed = lambda *given: given[2]

    def tell_worker_of_the_last_finish(self) -> None:
        """Run the empty steps in which vLLM passes on which requests finished."""
        for _ in range(3):  # of which two may be under way
            if self.scheduler.has_requests() or self.core.batch_queue:
                self.core.step_fn()

    def close(self) -> None:
        """Shut the engine down; the counters file goes with it.

        vLLM takes down what all engines of a process share: the last engine to be
        used must be the first to be closed.
        """
        self.llm.llm_engine.engine_core.shutdown()
        keep_imports_frozen()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- running ------------------------------------------------------------------

    def run(
        self, jobs: Iterable[Job], on_step: Callable[["Engine"], None] | None = None
    ) -> Run:
        session = Session(self, list(jobs))
        while session.step():
            if on_step is not None:
                on_step(self)
        return session.finish()


def serve(
    model: Path,
    policy: dict[str, Any] | None,
    jobs: Iterable[Job],
    *args: Any,
    **kw: Any,
) -> Run:
    """Run jobs on an engine of their own; further arguments are those of `Engine`."""
    with Engine(model, policy, *args, **kw) as engine:
        return engine.run(jobs)


def serve_again(
    model: Path,
    policy: dict[str, Any] | None,
    jobs: Iterable[Job],
    times: int = 2,
    **changes: Any,
) -> tuple[list[Run], list[Counter[str]]]:
    """Run the same jobs several times on one engine; return runs and hits of each."""
    runs, counts, jobs = [], [], list(jobs)
    with Engine(model, policy, **changes) as engine:
        for _ in range(times):
            counts.append(watch_hits(engine))
            runs.append(engine.run(jobs))
    return runs, counts


def keep_kernels() -> None:
    """Let vLLM replace kernels for its first engine in this process alone.

    It replaces them for good. For each further engine it would look through all modules
    again, which takes most of a start and in which vLLM 0.32 stumbles over llvmlite,
    imported by an engine that drafts n-grams.
    """
    from vllm.triton_utils import dispatcher

    dispatcher.register_kernels = lambda overrides: None


def watch_hits(engine: Engine) -> Counter[str]:
    """Count the tokens that each job takes from the cache until the next call."""
    hits: Counter[str] = Counter()
    manager = engine.scheduler.kv_cache_manager
    record = type(manager).record_prefix_cache_stats.__get__(manager)

    def recorded(request: Any, num_hits: int) -> None:
        hits[request.request_id.rsplit("-", 1)[0]] += num_hits
        record(request, num_hits)

    manager.record_prefix_cache_stats = recorded
    return hits


def read_records(trace: Path, read: set[Path]) -> dict[str, list[list[Record]]]:
    """Return a folder's events: per vLLM request id, one list per (re)compute.

    Args:
        trace: where an engine recorded its events.
        read: files to leave out; those that are read are added.
    """
    passes: dict[str, list[list[Record]]] = {}
    of_ranks: dict[tuple[Path, str], list[Path]] = {}
    for path in sorted(set(trace.rglob("*.npz")) - read):
        read.add(path)
        run = whole_run(path.parent)
        of_ranks.setdefault((run, path.name), []).append(path)
    for paths in of_ranks.values():
        record = Record(**vars(join_ranks([read_event(path) for path in paths])))
        lists = passes.setdefault(record.request_id, [])
        if record.ordinal == 0:
            lists.append([])
        lists[-1].append(record)
    return passes


class Session:
    """Jobs under way in one engine; several engines can be stepped in turn."""

    def __init__(self, engine: Engine, jobs: list[Job]) -> None:
        self.engine = engine
        self.waiting = sorted(jobs, key=lambda job: job.arrives)
        self.jobs: dict[str, Job] = {}  # by the id that vLLM gives a request
        self.named = {job.name: job for job in jobs}
        self.outputs: dict[str, Any] = {}
        self.steps = 0
        self._preemptions_before = engine._passes.num_preemptions
        self._free_before = engine.num_free

    def step(self) -> bool:
        """Add what arrives, step the engine; False when there is nothing left."""
        llm_engine = self.engine.llm.llm_engine
        while self.waiting and self.waiting[0].arrives <= self.steps:
            self._add(self.waiting.pop(0))
        if not self.waiting and not llm_engine.has_unfinished_requests():
            self.engine.tell_worker_of_the_last_finish()
            return False
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise RuntimeError(f"still running after {MAX_STEPS} steps")
        for output in llm_engine.step():
            self.outputs[output.request_id] = output
            job = self.named[output.request_id]
            num_tokens = len(output.outputs[0].token_ids)
            if job.aborted is not None and num_tokens >= job.aborted:
                llm_engine.abort_request([job.name])
        return True

    def _add(self, job: Job) -> None:
        from vllm import SamplingParams, TokensPrompt

        params = SamplingParams(
            temperature=0,
            max_tokens=job.max_tokens,
            ignore_eos=True,
            logprobs=TOP_LOGPROBS,
            prompt_logprobs=TOP_LOGPROBS if job.prompt_logprobs else None,
            detokenize=False,
            extra_args=job.extra_args,
        )
        request_id = self.engine.llm.llm_engine.add_request(
            job.name,
            TokensPrompt(prompt_token_ids=job.prompt),
            params,
            lora_request=job.lora,
            priority=job.priority,
        )
        self.jobs[request_id] = job

    def finish(self) -> Run:
        """Return what the jobs gave; nothing is left of them in the engine."""
        engine = self.engine
        assert engine.num_free == self._free_before, "superblocks are lost"
        has_policy = hasattr(engine.scheduler, "kv_policy_planner")
        assert not (has_policy and engine.scheduler.kv_policy_planner.states)
        trace = engine.trace
        records = {} if trace is None else read_records(trace, engine._read)
        results = {
            job.name: self._result(request_id, job, records.get(request_id, []))
            for request_id, job in self.jobs.items()
            if job.name in self.outputs
        }
        preemptions = engine._passes.num_preemptions - self._preemptions_before
        counters = engine.counters() if has_policy else {}
        return Run(results, self.steps, preemptions, counters)

    def _result(self, request_id: str, job: Job, records: list[list[Record]]) -> Result:
        output, passes = self.outputs[job.name], self.engine._passes
        completion = output.outputs[0]
        prompt_logprobs = (output.prompt_logprobs or [])[1:]
        return Result(
            job=job,
            tokens=list(completion.token_ids),
            logprobs=[_plain(entry) for entry in completion.logprobs],
            prompt_logprobs=[_plain(entry) for entry in prompt_logprobs],
            passes=passes.split(request_id, sum(records, [])),
            record=passes.split(request_id, passes.record[request_id]),
            computed_in=passes.tokens.get(request_id, []),
            output=output,
        )


def _plain(entry: dict[int, Any]) -> dict[int, float]:
    return {token: logprob.logprob for token, logprob in entry.items()}
