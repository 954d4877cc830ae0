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
from contextlib import contextmanager, nullcontext
from typing import Any

from benchmarks.overhead import (
    ENVIRONMENT,
    OUTPUT_TOKENS,
    Round,
    contest,
    make_engine,
    run_round,
)

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

    def play(name: str, number: int) -> Round:
        heard = listening(engines[name]) if name == OPEN else nullcontext()
        with heard:
            return run_round(engines[name], number, OUTPUT_TOKENS)

    contest(list(engines), options.pairs, play, "listening")


if __name__ == "__main__":
    main()
