"""Adds the argument group `KVPolicy` and merges given values into plain data."""

import argparse
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from types import MappingProxyType
from typing import Any

from vllm_kvpolicy.config import CONFIG_KEY, KVPolicyConfig
from vllm_kvpolicy.config_keys import (
    ALWAYS,
    FLAG_KEYS,
    NONE,
    PRESSURE,
    PROMPT,
    SYSTEM,
    IntegerKey,
    check_pin,
    shown,
    wrong,
)
from vllm_kvpolicy.policies.names import grammar, parse

# Keys of the plain form that have a flag, `--kv-` and the key.
KEYS = ("policy", *(key.key for key in FLAG_KEYS), "events", "pin", "policy_config")
KEYS += ("live",)
VARIABLES = {f"VLLM_KV_{key.upper()}": key for key in KEYS}
"""Of the environment, by which flags are set where another program starts vLLM."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the argument group; what is not given leaves no attribute."""
    group = parser.add_argument_group(
        title="KVPolicy",
        description="Drop the least important part of requests' KV cache and return "
        "the memory to the scheduler. All numbers are tokens per KV head.",
    )
    add = partial(group.add_argument, default=argparse.SUPPRESS)
    add(
        "--kv-policy",
        metavar="NAME",
        type=_type(lambda text: parse(text).name),
        help=f"Policy to use: {grammar(in_full=False)}. Off by default.",
    )
    for key in FLAG_KEYS:
        default = getattr(KVPolicyConfig, key.field) or key.absent
        told = f"{key.summary[0].upper()}{key.summary[1:]} (default: {default})."
        add(
            f"--kv-{key.key}",
            metavar="TOKENS",
            type=_type(partial(_integer, key)),
            help=told.replace("%", "%%"),
        )
    add(
        "--kv-events",
        choices=(ALWAYS, PRESSURE),
        help=f"{PRESSURE}: nobody is cut while there is room; when the pool runs short "
        "the longest are cut, as deep as it needs, and the budget is the floor. "
        f"{ALWAYS}: every request is cut to its budget at positions that follow from "
        f"the request alone (default: {PRESSURE}; {ALWAYS} with a preset, or without "
        "a scorer).",
    )
    add(
        "--kv-pin",
        metavar="WHAT",
        type=_type(_pin),
        help="First tokens of each prompt that stay where they are, shared and cached; "
        f"the budget counts what is kept behind them: {SYSTEM} for system messages and "
        f"tools of a chat, {PROMPT} for all, a number of tokens, or {NONE} "
        f"(default: {NONE}; {PROMPT} with rpc and epikv).",
    )
    add(
        "--kv-policy-config",
        metavar="JSON",
        type=_type(_json_object),
        help='Options of the policy, such as \'{"preset": "paper"}\'; they override a '
        'preset. {"allow": [NAME, ...]} lists more policies that requests may '
        'choose; {"trace": FOLDER} records what each event keeps; {"spread_events": '
        'false} leaves events of equal requests in the same steps; {"report_events": '
        'true} has answers say what their events dropped; {"hints": true} lets '
        "requests say which tokens stay and which go first.",
    )
    add(
        "--kv-live",
        action="store_true",
        help="Serve a page, /kv_policy/live, and routes that show which requests run "
        "and what their heads keep. No text of prompts or answers leaves the server, "
        'unless {"live_text": true} in --kv-policy-config says so.',
    )


def given_values(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plain form of a parsed command line, or of keyword arguments."""
    found = {key: arguments.get(f"kv_{key}") for key in KEYS}
    return {key: value for key, value in found.items() if value is not None}


def from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the plain form of the flags that are environment variables.

    The variable of `--kv-budget` is VLLM_KV_BUDGET; an empty one says nothing, and
    VLLM_KV_POLICY=none makes all others say nothing.

    Raises:
        ValueError: naming the variable, its value and what is valid.
    """
    if environment.get("VLLM_KV_POLICY") == NONE:
        return {}
    found: dict[str, Any] = {}
    for variable, key in VARIABLES.items():
        text = environment.get(variable)
        if not text:
            continue
        parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
        add_arguments(parser)
        flag = f"--kv-{key.replace('_', '-')}"
        try:
            if key == "live":
                words = {"0": [], "1": [flag]}.get(text)
                if words is None:
                    raise ValueError(f"got {text!r}, expected 0 or 1")
            else:
                words = [f"{flag}={text}"]
            found |= given_values(vars(parser.parse_args(words)))
        except (ValueError, argparse.ArgumentError) as error:
            said = getattr(error, "message", str(error))
            raise ValueError(f"{variable}: {said}") from None
    return found


def merge(
    additional_config: Any,
    given: Mapping[str, Any],
    under: Mapping[str, Any] = MappingProxyType({}),
) -> Any:
    """Put given values in plain form, which win, into vLLM's `additional_config`.

    Args:
        under: values over which those of `additional_config` win, too; nothing where
            nobody names a policy.

    Returns:
        `additional_config` itself where nothing is given, else a new dict.

    Raises:
        ValueError: values are given, and `additional_config`, or what it has under our
            key, is no mapping.
    """
    has_own = isinstance(additional_config, Mapping) and CONFIG_KEY in additional_config
    if not given and not (under if has_own else "policy" in under):
        return additional_config
    if not isinstance(additional_config or {}, Mapping):
        raise ValueError(
            f"additional_config: got {type(additional_config).__name__}, expected a "
            "mapping when --kv-policy is given"
        )
    merged = dict(additional_config or {})
    present = merged.get(CONFIG_KEY, {})
    if not isinstance(present, Mapping):
        raise ValueError(
            f"additional_config: got {shown(present)} under {CONFIG_KEY!r}, expected a "
            "mapping"
        )
    merged[CONFIG_KEY] = {**under, **present, **given}
    return merged


def _type(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return argparse's `type` of a function whose ValueErrors say what is wrong."""

    def convert(text: str) -> Any:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def _integer(key: IntegerKey, text: str) -> Any:
    value: Any = text
    with suppress(ValueError):  # the check names what is no number
        value = int(text)
    return key.check(value, f"kv_{key.key}")


def _pin(text: str) -> str | int:
    value = int(text) if text.isascii() and text.isdigit() else text
    check_pin("kv_pin", value)
    return value


def _json_object(text: str) -> dict[str, Any]:
    value = None
    with suppress(ValueError, RecursionError):
        value = json.loads(text)
    if not isinstance(value, dict):
        raise wrong("kv_policy_config", text, "a JSON object")
    return value
