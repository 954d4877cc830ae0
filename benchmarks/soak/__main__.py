"""Soaks servers for some minutes; see the package.

    python -m benchmarks.soak [--minutes 60] [--seed 0] [--events pressure] [--out FILE]

Ends with status 0 if every promise held, with status 1 and the first broken promise, or
with status 2 and the reason if the promises could not be checked: a server does not
start, stock ends, a policy has no clear probe, or a promise has no check. The reason is
one line, which says where the logs of the servers are, too; `--out` gets a record in
all three cases.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks import provenance, server
from benchmarks.printing import log
from benchmarks.soak import faults, settings
from benchmarks.soak.probes import NoProbe
from benchmarks.soak.promises import OF_FAULTS, OF_SOAK, BrokenPromise, Ledger
from benchmarks.soak.waves import Side, Soak

MODULE = "benchmarks.soak"
NOT_CHECKED = (server.ServerError, NoProbe, aiohttp.ClientError)


def arguments_of(words: list[str] | None) -> argparse.Namespace:
    """Return the options of a command line."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {MODULE}",
        description="Soaks servers for some minutes; see docs/reliability.md. Ends "
        "with status 1 at the first broken promise, with 2 if they cannot be checked.",
    )
    parser.add_argument("--minutes", type=float, default=60, help="of random traffic")
    parser.add_argument("--seed", type=int, default=0, help="of the requests")
    parser.add_argument("--model", type=Path, default=settings.MODEL, help="a folder")
    parser.add_argument(
        "--gates", type=Path, default=settings.GATES, help="write gates of the model"
    )
    parser.add_argument("--events", default="always", choices=("always", "pressure"))
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    parser.add_argument("--logs", type=Path, help="folder for the servers' logs")
    return parser.parse_args(words)


@contextmanager
def both_servers(options: argparse.Namespace, logs: Path) -> Iterator[list[Side]]:
    """Yield the server with policies and the stock server, both healthy."""
    words = {
        settings.OURS: settings.policy_arguments(
            options.model, options.gates, options.events
        ),
        settings.STOCK: settings.stock_arguments(options.model),
    }
    with server.running(words, logs, environment=settings.ENVIRONMENT) as servers:
        yield [Side(servers[name]) for name in words]


def soak(options: argparse.Namespace, logs: Path, record: dict[str, Any]) -> None:
    """Run waves and faults, and fill a record.

    Raises:
        BrokenPromise: the first promise that did not hold; the record has all until
            then.
        ServerError, NoProbe, aiohttp.ClientError: promises could not be checked; the
            record has all until then, too.
    """
    ledger = Ledger()
    names = [promise.name for promise in (*OF_SOAK, *OF_FAULTS)]
    began = time.monotonic()
    try:
        with both_servers(options, logs) as sides:
            waves = Soak(*sides, options.seed, ledger)
            try:
                asyncio.run(waves.run(options.minutes))
            finally:
                record |= waves.summary()
        faults.run(options.model, options.gates, logs, options.seed, ledger)
        if missed := [name for name in names if not ledger.checks[name]]:
            record["not_checked"] = f"nothing has checked {', '.join(missed)}"
    finally:
        record["checks"] = {name: ledger.checks[name] for name in names}
        record["wall_minutes"] = round((time.monotonic() - began) / 60, 1)


def main(words: list[str] | None = None) -> int:
    """Run a soak; return the exit status."""
    options = arguments_of(words)
    logs = options.logs or Path(tempfile.mkdtemp(prefix="soak-"))
    logs.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {
        "provenance": provenance.collect(MODULE),
        "seed": options.seed,
        "minutes": options.minutes,
        "policies": settings.POLICIES,
        "events": options.events,
        "broken": None,
        "not_checked": None,
    }
    try:
        soak(options, logs, record)
    except BrokenPromise as broken:
        record["broken"] = str(broken)
        log(f"broken promise, {broken} The logs are in {logs}")
    except NOT_CHECKED as error:
        # What follows in a ServerError is the end of a log.
        what = str(error).partition("; the log ends with")[0] or repr(error)
        record["not_checked"] = " ".join(what.split())
    if record["not_checked"]:
        log(f"promises not checked, {record['not_checked']}. The logs are in {logs}")
    if options.out:
        options.out.write_text(json.dumps(record, indent=1) + "\n")
    log(json.dumps(record["checks"]))
    return 1 if record["broken"] else 2 if record["not_checked"] else 0


if __name__ == "__main__":
    sys.exit(main())
