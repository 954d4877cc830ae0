"""The oracles of tests/engine on the GPU: float32, Triton attention, graphs, V2 runner.

What the policies should have kept, and the log-probabilities that follow from what was
kept, are recomputed by a plain decoder on the CPU.
"""

import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.check.engines import (
    BASE,
    is_ragged,
    one_of_each,
    options_of,
    served_names,
)
from benchmarks.gpu.check.where import GPU, QUICK, Graphs, assert_given_back
from support.calibration_files import options_for
from support.engine.helpers import Engine, Job, Result
from support.engine.oracle_plumbing import check_plumbing
from support.engine.oracle_replay import Mismatch, check_replay
from support.engine.oracle_selection import Report, check_selection
from support.engine.reference_decoder import ReferenceDecoder
from support.tiny_model import make_tiny_model
from vllm_kvpolicy.config import KVPolicyConfig
from vllm_kvpolicy.config_keys import ALWAYS, PRESSURE
from vllm_kvpolicy.policies.names import names

TIGHT = {"max_num_batched_tokens": 128, "max_model_len": 832}
BLOCK, NUM_BLOCKS = 32, 60
SELECTED = ("streaming", "tova", "snapkv", "ams-tova", "ams-snapkv")
ON_GPU = {
    **GPU,
    **QUICK,
    **TIGHT,
    "dtype": "float32",
    "attention_backend": "TRITON_ATTN",
    "block_size": BLOCK,
}


@dataclass(frozen=True)
class Oracles:
    """What the oracles look at.

    Args:
        policies: names, one request each.
        num_blocks: of the pool; too few for all requests at once.
    """

    policies: Sequence[str]
    settings: dict[str, Any]
    num_blocks: int = NUM_BLOCKS
    events: str = ALWAYS

    @property
    def label(self) -> str:
        """What follows the names of checks."""
        lengths = ", own lengths" if is_ragged(self.policies[0]) else ""
        return lengths + (", called events" if self.events == PRESSURE else "")


def check_on_gpu(checks: Any) -> None:
    """Check every policy that a GPU serves, those with a calibration file too."""
    calibrated = ("triattention", "qfilter")
    for ragged in (False, True):
        served = set(served_names(ragged)).union(() if ragged else calibrated)
        chosen = [name for name in names() if name in served]
        for events in (ALWAYS, PRESSURE):
            check_oracles(checks, Oracles(chosen, ON_GPU, events=events))


def check_oracles(checks: Any, what: Oracles) -> None:
    """Run one request of each policy, and judge all that the server did."""
    tier = what.label
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_model(Path(folder) / "model")
        trace = Path(folder) / "trace"
        values = policy_values(what, Path(folder))
        jobs = one_of_each(what.policies, 290, prompt_logprobs=True)
        with (
            checks.case(f"a run that strains the engine{tier}") as notes,
            Engine(model, values, trace, what.num_blocks, **what.settings) as engine,
        ):
            graphs = Graphs(engine, what.settings.get("attention_backend", ""))
            if what.events == ALWAYS:
                engine.admit_as_vllm_does()
            run = engine.run(jobs)
            had = [bool(result.events) for result in run.results.values()]
            if what.events == ALWAYS:
                assert run.preemptions > 0 and all(had)
            else:
                assert run.preemptions == 0 and sum(had) >= len(had) // 2
            assert_given_back(engine)
            notes.append(f"{len(jobs)} policies, {run.preemptions} preemptions")
            notes.append(f"{sum(had)} had events")
            notes += graphs.proof(run.steps)
        decoder = ReferenceDecoder(model)
        results = list(run.results.values())
        with checks.case(f"log-probabilities follow from survivors{tier}") as notes:
            notes.append(chosen_otherwise(results))
            worst, wrong = replayed(decoder, results)
            notes.append(f"largest difference {worst:.1e}")
            # All of them, for one policy says little about what is wrong.
            assert not wrong, f"{len(wrong)} of {len(results)}: {'; '.join(wrong)}"
        with checks.case(f"selection is the policies'{tier}") as notes:
            report = Report()
            for result in results:
                # The tiny model's keys all have one length: knorm sees ties only.
                if "knorm" not in result.job.name:
                    config = request_config(values, result.job)
                    options = config.resolved().options
                    check_plumbing(decoder, result, config, options, BLOCK, report)
            notes.append(judged(report))
        selected = [each for each in results if each.job.name in SELECTED]
        if not selected:
            return
        with checks.case(f"selection is the references'{tier}") as notes:
            report = Report()
            for result in selected:
                config = request_config(values, result.job)
                check_selection(decoder, result, config, BLOCK, report)
            notes.append(judged(report))


def replayed(
    decoder: ReferenceDecoder, results: Sequence[Result]
) -> tuple[float, list[str]]:
    """Return the largest difference of requests that agree, and what others lack."""
    worst, wrong = 0.0, []
    for result in results:
        try:
            worst = max(worst, check_replay(decoder, result))
        except Mismatch as mismatch:
            wrong.append(str(mismatch))
    return worst, wrong


def chosen_otherwise(results: Sequence[Result]) -> str:
    """Return how many events ended in another way when they were computed anew.

    Those that are called for need not come again.
    """
    names: Counter[str] = Counter()
    repeated = 0
    for result in results:
        for events in result.passes[:-1]:
            for before in events[: len(result.events)]:
                after = result.events[before.ordinal]
                repeated += 1
                is_other = not np.array_equal(before.survivors, after.survivors)
                names[result.job.name] += is_other
    by_name = ", ".join(f"{name} {count}" for name, count in (+names).items())
    return f"{repeated} events computed anew, other survivors: {by_name or 'none'}"


def policy_values(what: Oracles, folder: Path) -> dict[str, Any]:
    """Return the server's policy: the first name, all others allowed."""
    first, *others = what.policies
    options = options_of(what.policies)
    for scorer in ("triattention", "qfilter"):
        if scorer in what.policies:
            options |= options_for(scorer, folder, 2, 2, 2, 32)
    policy = {"policy": first, "allow": others, "events": what.events}
    return policy | {"policy_config": options, **BASE}


def request_config(values: dict[str, Any], job: Job) -> KVPolicyConfig:
    """Return a request's policy."""
    config = KVPolicyConfig.from_dict(values).with_request(job.extra_args, BLOCK)
    assert config is not None
    return config


def judged(report: Report) -> str:
    """Return how many decisions agree, or raise where too many do not."""
    report.check()
    assert report.decisions > 0
    ties = len(report.near_ties)
    return f"{report.decisions} decisions, {ties} differ at near ties"
