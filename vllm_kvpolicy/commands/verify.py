"""`vllm-kvpolicy verify`: checks policies here or on a server, and prints a report."""

import argparse
import platform
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

from vllm_kvpolicy import compat
from vllm_kvpolicy.api import cli
from vllm_kvpolicy.commands import judge
from vllm_kvpolicy.commands.judge import Check
from vllm_kvpolicy.commands.outputs import quiet, table
from vllm_kvpolicy.commands.verify_server import Server
from vllm_kvpolicy.commands.verify_server import checks as checks_of_server
from vllm_kvpolicy.config import KVPolicyConfig
from vllm_kvpolicy.config_keys import ALWAYS, AUTO, MOST, PRESSURE
from vllm_kvpolicy.kernels import preferences

OWN = "vllm-kvpolicy"
DISTRIBUTIONS = (OWN, "vllm", "torch", "triton")
DEFAULTS = {"policy": "ams-tova", "budget": 128, "events": ALWAYS}
INTERVAL, DTYPE = 64, "float32"
Lines = list[tuple[str, str]]


def main(words: Sequence[str]) -> int:
    """Print a block to paste into an issue; 0 where all is well, else 1.

    ValueError where there is no such model or server, or it cannot be asked.
    """
    started = time.monotonic()
    parser = _parser()
    given = parser.parse_args(words)
    flags = cli.given_values(vars(given))
    if (given.target is None) == (given.feature is None):
        parser.error("expected a MODEL, a URL or --feature, one of them")
    if given.feature is not None and (flags or given.dtype is not None):
        parser.error("--kv-* and --dtype: leave them out with --feature")
    if given.feature is not None:
        lines, checks = _of_feature(given.feature)
    elif not given.target.startswith(("http://", "https://")):
        lines, checks = _of_model(given, flags)
    elif flags or given.dtype is not None:
        parser.error(
            "--kv-* and --dtype: a server has its own, leave them out with a URL"
        )
    else:
        lines, checks = _of_server(given)
    found = _told_each(checks)
    print(table([("verified", given.target or given.feature), *lines]))
    print(f"\n{table((each.result, each.name, each.figures) for each in found)}")
    seconds = time.monotonic() - started
    print(f"\n{judge.summary(found)} ({seconds:.0f} s)")
    if given.feature is not None and all(each.result == judge.PASSED for each in found):
        import_module("vllm_kvpolicy.api.evidence").remember(given.feature)
    return 0 if judge.is_healthy(found) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vllm-kvpolicy verify",
        description="Check policies, in engines of this process with a MODEL or on a "
        "running server with its URL, and print a report to paste into an issue.",
    )
    add = parser.add_argument
    target = "folder or name, or http://HOST:PORT"
    add("target", metavar="MODEL|URL", nargs="?", help=target)
    add(
        "--feature",
        metavar="NAME",
        help="check one that a start calls untested on this device, with a tiny model "
        "made for it; what passes is not called so again",
    )
    add(
        "--dtype",
        help=f"of a MODEL (default: {DTYPE}, in which moved tokens give equal answers)",
    )
    add("--api-key", help="of a server that asks for one")
    cli.add_arguments(parser)
    return parser


def _of_server(given: argparse.Namespace) -> tuple[Lines, Iterator[Check]]:
    server = Server(given.target, given.api_key)
    lines = [
        ("model", server.model),
        ("policy", "not told" if server.policy is None else server.policy),
        ("vllm of the server", server.version),
        (f"{OWN} here", compat.package_version(OWN)),
    ]
    return lines, checks_of_server(server)


def _config(flags: Mapping[str, Any]) -> KVPolicyConfig:
    """Return the policy to check: small numbers, where flags do not say otherwise."""
    for key, value in flags.items():
        if value in (PRESSURE, AUTO) or key == "ceiling":
            raise ValueError(
                f"--kv-{key}: got {value}, expected another value or none: the checks "
                f"are of {ALWAYS!r}, events at positions that the pool does not change"
            )
    config = KVPolicyConfig.from_dict({"interval": MOST, **DEFAULTS, **flags})
    if "interval" in flags:
        return config
    windows = (each.window_tokens for each in config.all_resolved)
    return replace(config, interval_tokens=max(INTERVAL, *windows))


def _of_model(
    given: argparse.Namespace, flags: Mapping[str, Any]
) -> tuple[Lines, Iterator[Check]]:
    """Return what is said of a model's engines, and their checks, which start them."""
    config, dtype = _config(flags), given.dtype or DTYPE
    # Loads vLLM, which a server's URL does not need.
    engine = import_module("vllm_kvpolicy.commands.verify_engine")
    compat.multiply_float32_exactly()
    lines = _of_machine(config, dtype)
    return lines, engine.checks(given.target, dtype, config, _say)


def _of_feature(name: str) -> tuple[Lines, Iterator[Check]]:
    """Return what is said of a feature's engines, and their checks.

    On GPUs they run in float32, where answers must be equal, and in bfloat16, where
    they run with the kernels that servers use.
    """
    trials = import_module("vllm_kvpolicy.commands.trials").TRIALS
    is_gpu = compat.platform_name() != "cpu"
    here = [each for each, trial in trials.items() if is_gpu or trial.on_cpu]
    if name not in here:
        device = "a GPU" if is_gpu else "a CPU"
        raise ValueError(
            f"--feature: got {name}, expected on {device} one of {', '.join(here)}"
        )
    compat.multiply_float32_exactly()
    config, trial = _config({}), trials[name]
    dtypes = trial.gpu_dtypes if is_gpu else (DTYPE,)
    engine = import_module("vllm_kvpolicy.commands.verify_engine")
    lines = _of_machine(config, " and ".join(dtypes))
    return lines, engine.trial_checks(trial, dtypes, config, _say)


def _of_machine(config: KVPolicyConfig, dtype: str) -> Lines:
    name = compat.platform_name()
    numbers = f"budget {config.budget_tokens}, interval {config.interval_tokens}"
    return [
        ("python", platform.python_version()),
        ("platform", name),
        ("kernels", preferences.summary(name)),
        ("policy", f"{config.policy}, {numbers}, {dtype}"),
        *((name, compat.package_version(name)) for name in DISTRIBUTIONS),
    ]


def _say(what: str) -> None:
    """Say on stderr what is going on, which is no part of the report."""
    print(f"verify: {what}", file=sys.stderr, flush=True)


def _told_each(checks: Iterable[Check]) -> list[Check]:
    """Return checks, each told as soon as it is judged."""
    found = []
    with quiet():
        for check in checks:
            _say(f"{check.result}: {check.name}")
            found.append(check)
    return found
