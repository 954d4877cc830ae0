"""A minute of mixed traffic on stock vLLM, a minute on a policy, and one table.

    make demo
    python -m benchmarks.demo --policy ams-tova --seconds 30

Eight clients send one request after the other, short and long ones by chance, to a pool
for two of the longest. First tokens are those of requests that ended. While a policy's
minute runs, its live page shows what is held. This is a look at the thing, not a
measurement: there is one round.
"""

import argparse
import asyncio
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.load import Completion, complete, open_session, sampled
from benchmarks.provenance import ROOT
from benchmarks.server import EngineSettings, Server, running
from benchmarks.workload import ordinary_token_ids
from vllm_kvpolicy.commands.inputs import positive
from vllm_kvpolicy.commands.outputs import table

MODEL = ROOT / "reasoner" / "checkpoint"
CLIENTS = 8
LENGTHS = ((64, 1500), (200, 600), (500, 200), (1000, 100))
"""Of prompts and answers, tokens."""
SETTINGS = EngineSettings(
    model=str(MODEL),
    max_model_len=2048,
    max_num_seqs=CLIENTS,
    kv_cache_bytes=2**29,
    block_size=32,
    blocks=112,
)
COUNTERS = {
    "tokens": "vllm:generation_tokens_total",
    "preemptions": "vllm:num_preemptions_total",
    "dropped": "kvpolicy_tokens_dropped_total",
}


@dataclass
class Minute:
    """What a server did while clients sent requests.

    Attributes:
        done: requests that were answered to the end.
        grown: of COUNTERS, by how much they grew.
        usage: largest sampled share of the pool that was held.
    """

    seconds: float
    done: list[Completion] = field(default_factory=list)
    grown: dict[str, float] = field(default_factory=dict)
    usage: float = 0.0

    @property
    def cells(self) -> list[str]:
        """The columns of the table, see HEAD."""
        waits = sorted(one.arrivals[0] - one.started for one in self.done)
        slow = f"{waits[int(0.95 * len(waits))]:.1f} s" if waits else "-"
        dropped = self.grown.get("dropped")
        return [
            f"{self.grown['tokens'] / self.seconds:.0f}",
            str(len(self.done)),
            slow,
            f"{self.grown['preemptions']:.0f}",
            f"{self.usage:.0%}",
            "-" if dropped is None else f"{dropped:.0f}",
        ]


HEAD = (
    *("", "tokens/s", "requests", "first token, 95 %", "preemptions", "pool at most"),
    "tokens dropped per head",
)


async def _traffic(server: Server, tokens: tuple[int, ...], minute: Minute) -> None:
    """Have clients send requests until the time is over, and abort what still runs."""

    async def client(number: int) -> None:
        rng = random.Random(number)
        while True:
            prompt, answer = rng.choice(LENGTHS)
            ids = rng.choices(tokens, k=prompt)
            minute.done.append(await complete(session, ids, answer))

    async def clients() -> None:
        tasks = [asyncio.create_task(client(number)) for number in range(CLIENTS)]
        try:
            done, _ = await asyncio.wait(
                tasks,
                timeout=minute.seconds,
                return_when=asyncio.FIRST_EXCEPTION,
            )
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async with open_session(server.url, has_reuse=False) as session:
        _, samples = await sampled(clients(), server.metrics)
    used = [sample["vllm:kv_cache_usage_perc"] for sample in samples]
    minute.usage = max(used, default=0.0)


def play(server: Server, seconds: float) -> Minute:
    """Return what a server did in a minute of mixed traffic.

    Raises:
        LoadError: a request failed.
    """
    minute, before = Minute(seconds), server.metrics()
    began = time.monotonic()
    asyncio.run(_traffic(server, ordinary_token_ids(MODEL), minute))
    after, minute.seconds = server.metrics(), time.monotonic() - began
    minute.grown = _grown(before, after)
    return minute


def _grown(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, Any]:
    """Return by how much counters grew, those that the server has."""
    return {
        name: after[series] - before.get(series, 0.0)
        for name, series in COUNTERS.items()
        if series in after
    }


def main(argv: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.demo")
    parser.add_argument("--policy", default="ams-expected", metavar="NAME")
    parser.add_argument("--seconds", type=positive, default=60, help="for each server")
    given = parser.parse_args(argv)
    stock = SETTINGS.arguments()
    policy = ["--kv-policy", given.policy, "--kv-budget", "auto", "--kv-live"]
    kinds = {"stock": stock, given.policy: [*stock, *policy, "--kv-interval", "128"]}
    rows = []
    with TemporaryDirectory() as folder:
        for name, words in kinds.items():
            print(f"{name}: starting", flush=True)
            with running({name: words}, Path(folder)) as servers:
                server = servers[name]
                page = "" if name == "stock" else f", see {server.url}/kv_policy/live"
                print(f"{name}: {given.seconds} s of traffic{page}", flush=True)
                rows.append([name, *play(server, given.seconds).cells])
    print(f"\n{table([HEAD, *rows])}")
    print(
        "Without room stock preempts requests and computes them again; a policy cuts "
        "the longest.\nTo compute this small model again costs little, and other work "
        "on the machine changes\nboth rows: README.md has what a large one gains."
    )


if __name__ == "__main__":
    main()
