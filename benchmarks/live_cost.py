"""Times an engine with `live` while somebody listens, while nobody does, and without.

Three engines in this process take turns on the same requests. Who listens is another
process that reads what the engine tells as an API process does, four times a second.

    python -m benchmarks.live_cost [--policy ams-tova] [--budget 128] [--pairs 15]
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.overhead import ENVIRONMENT, OUTPUT_TOKENS, make_engine, run_round
from benchmarks.stats import median_ratio

OFF, CLOSED, OPEN = "off", "closed", "open"
LISTENER = """
import sys, time
from vllm_kvpolicy.observe.hub import EngineReader, Hub
hub = Hub({0: EngineReader(sys.argv[1], 1)}, 1)
while True:
    hub.poll()
    if hub.state()["engines"][0]["counters"]:
        print(hub.num_messages, flush=True)
    time.sleep(0.25)
"""


@contextmanager
def listening(engine: Any) -> Iterator[None]:
    """Listen to an engine from another process.

    Raises:
        RuntimeError: the engine has told nothing although it had events.
    """
    from vllm_kvpolicy.observe.shared_files import own_engine

    name = own_engine(engine.llm_engine.vllm_config)
    command = [sys.executable, "-c", LISTENER, name]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    yield
    process.terminate()
    told = process.stdout.read().split()
    process.wait()
    if not told or int(told[-1]) == 0:
        raise RuntimeError("the engine told of no event")


def main() -> None:
    """Print throughput ratios with bootstrap intervals."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="reasoner/checkpoint")
    parser.add_argument("--policy", default="ams-tova")
    parser.add_argument("--budget", type=int, default=128, help="tokens")
    parser.add_argument("--pairs", type=int, default=15)
    options = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    plain = options.model, options.policy, options.budget
    engines = {OFF: make_engine(*plain), CLOSED: make_engine(*plain, live=True)}
    engines[OPEN] = make_engine(*plain, live=True)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
    for number in range(-1, options.pairs):
        order = list(engines) if number % 2 else list(reversed(engines))
        tokens = {}
        for name in order:
            if name == OPEN:
                with listening(engines[name]):
                    round_ = run_round(engines[name], number, OUTPUT_TOKENS)
            else:
                round_ = run_round(engines[name], number, OUTPUT_TOKENS)
            tokens[name] = round_[2]
            if number >= 0:  # the first round warms up
                times[name].append(round_[:2])
        if not tokens[OFF] == tokens[CLOSED] == tokens[OPEN]:
            raise RuntimeError(f"round {number}: listening changed the tokens")
    for column, kind in enumerate(("wall", "CPU")):
        before, *others = ([pair[column] for pair in times[name]] for name in engines)
        for name, after in zip((CLOSED, OPEN), others, strict=True):
            ratio = median_ratio(before, after)
            print(
                f"{name} / {OFF}, tokens per {kind} second, {options.pairs} pairs: "
                f"{ratio.median:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"
            )


if __name__ == "__main__":
    main()
