"""Keys of the plain form of a configuration, and the integers among them.

Flags, checks, per-request keys and docs iterate these; `llm.LLM` lists its keywords by
hand.
"""

import difflib
import os
import re
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

DEFAULT_SINKS, DEFAULT_RECENT = 4, 32
DEFAULT_PREFILL_INTERVAL = 4096  # or the whole superblocks in it
WHOLE_PROMPT = "prompt"  # a prefill interval that no prompt is as long as
AUTO = "auto"  # a budget that follows from the pool, see `sizes.worded_budget`
LEAST_AUTO = 256  # tokens of such a budget
SHARE = re.compile(r"(\d{1,3}(?:\.\d+)?)%")  # a budget that follows from the request
MOST = 2**31 - 1  # of any integer, far above every context
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80


def shown(value: Any) -> str:
    """Return a value that a user gave as an error shows it, short."""
    return _SHORT.repr(value)


def nearest(word: str, known: Iterable[str]) -> str:
    """Return a question about the known word that a wrong one is like, or nothing.

    >>> nearest("intervall", ["budget", "interval"])
    " (did you mean 'interval'?)"
    """
    found = difflib.get_close_matches(word, known, n=1, cutoff=0.75)
    return f" (did you mean {found[0]!r}?)" if found else ""


def wrong(key: str, value: Any, expected: str) -> ValueError:
    """Return the error of a value that a user gave."""
    return ValueError(f"{key}: got {shown(value)}, expected {expected}")


def share_of(value: Any) -> float | None:
    """Return what a text such as `25%` says, above 0 to 1; None for anything else."""
    found = SHARE.fullmatch(value) if isinstance(value, str) else None
    share = float(found[1]) / 100 if found else 0.0
    return share if 0 < share <= 1 else None


@dataclass(frozen=True)
class IntegerKey:
    """One integer of the configuration.

    Args:
        key: name in the plain form; the flag is `--kv-` plus this name.
        field: attribute of KVPolicyConfig.
        summary: what it counts, with its unit.
        is_flag: has a flag of its own and may be given per request.
        word: what may be given in place of a number, None for nothing.
        absent: what no number means.
        has_share: a share of a request's length may be given, also by a request.
    """

    key: str
    field: str
    minimum: int
    summary: str
    is_flag: bool = True
    word: str | None = None
    absent: str = "auto"
    has_share: bool = False

    def check(
        self, value: Any, label: str | None = None, of_request: bool = False
    ) -> Any:
        """Return `value` if it is a valid integer, or what is valid in place of one.

        Args:
            label: the key as the user knows it.
            of_request: a request gives it, which may not use the word.

        Raises:
            ValueError: anything else, True and 64.0 included.
        """
        has_word = self.word is not None and not of_request
        if has_word and value == self.word:
            return value
        if self.has_share and share_of(value) is not None:
            return value
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        if is_integer and self.minimum <= value <= MOST:
            return value
        word = f" or {self.word!r}" if has_word else ""
        share = " or a share such as '25%', at most 100%"
        word = f"{word}{share}" if self.has_share else word
        valid = f"an integer >= {self.minimum}"
        if is_integer and value > MOST:
            valid = f"at most {MOST}"
        raise wrong(label or self.key, value, f"{valid}{word}")


INTEGER_KEYS = (
    IntegerKey(
        "budget",
        "budget_tokens",
        1,
        "tokens per KV head left after an event: sinks, selected and newest tokens; at "
        "least sinks, recent and one block; with events `pressure` the fewest that a "
        f"request is cut to, or `{AUTO}`: what the pool has for each of max-num-seqs "
        f"requests of max-model-len, at least {LEAST_AUTO}; or a share such as 25% of "
        "each request's prompt and answer limit",
        word=AUTO,
        has_share=True,
    ),
    IntegerKey(
        "interval", "interval_tokens", 1, "tokens that a request grows between events"
    ),
    IntegerKey(
        "ceiling",
        "ceiling_tokens",
        1,
        "with events `pressure`, tokens per KV head to which a request is cut, even "
        "with room for it, when it holds an interval more",
        absent="none",
    ),
    IntegerKey("recent", "recent_tokens", 0, "newest tokens that are always kept"),
    IntegerKey("sinks", "sink_tokens", 0, "first tokens that are always kept"),
    IntegerKey(
        "prefill_interval",
        "prefill_interval_tokens",
        1,
        "tokens between two events inside a prompt, a multiple of the block size, by "
        f"default {DEFAULT_PREFILL_INTERVAL} or what whole blocks of it hold; or "
        "`prompt` for none before its end: then the prefix cache can share the whole "
        "prompt, and the pool must hold it",
        is_flag=False,
        word=WHOLE_PROMPT,
    ),
    IntegerKey(
        "events_per_step",
        "events_per_step",
        1,
        "most events in one engine step, the rest wait; by default twice what the "
        "largest batch needs on average, at least 8",
        is_flag=False,
    ),
)
ALWAYS, PRESSURE = "always", "pressure"  # when events come
NONE, SYSTEM, PROMPT = PINS = "none", "system", "prompt"  # what is pinned of a prompt
# Keys that are true or false, and fields of the same names.
SWITCHES = ("spread_events", "report_events", "hints", "live", "live_text")
FLAG_KEYS = tuple(key for key in INTEGER_KEYS if key.is_flag)
VALID_KEYS = (
    "policy",
    *(key.key for key in INTEGER_KEYS),
    "policy_config",
    "allow",
    "events",
    "pin",
    "trace_dir",
    *SWITCHES,
)
# Keys of `--kv-policy-config` about the server -> keys of the plain form.
SERVER_OPTIONS = {
    "allow": "allow",
    "trace": "trace_dir",
    **{switch: switch for switch in SWITCHES},
}


def check_pin(key: str, value: Any, of_request: bool = False) -> None:
    """Raise ValueError unless a value says what is pinned of a prompt.

    None leaves it to the policy, but for a request.
    """
    is_number = isinstance(value, int) and not isinstance(value, bool)
    is_number = is_number and 0 <= value <= MOST
    is_left = value is None and not of_request
    if not (is_left or is_number or value in PINS):
        words = ", ".join(map(repr, PINS))
        raise wrong(key, value, f"{words} or a number of tokens, at most {MOST}")


def trace_folder(value: Any) -> str | None:
    """Return the folder of a trace, with the user's own in place of a leading ~.

    Raises:
        ValueError: `value` is neither None nor the name of a folder.
    """
    folder = os.path.expanduser(value) if isinstance(value, str) else ""
    if value is not None and (not folder or "\0" in folder or folder[0] == "~"):
        raise wrong("trace_dir", value, "the name of a folder")
    return folder or None


# Ranges of tokens that a request gives, and of a chat messages in place of tokens.
KEEP, DROP_FIRST = "kv_keep", "kv_drop_first"
MESSAGE_KEYS = {"kv_keep_messages": KEEP, "kv_drop_messages": DROP_FIRST}
HINT_KEYS = (KEEP, DROP_FIRST, *MESSAGE_KEYS)
# Keys of `extra_args` that begin like ours and belong to vLLM.
_VLLM_REQUEST_KEYS = ("kv_transfer_params", "kv_cache_report_mode", "kv_hints")


def request_keys(extra_args: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the keys of a request that are ours.

    Raises:
        ValueError: a key begins like ours and is unknown, or the server's alone.
    """
    numbers = (f"kv_{key.key}" for key in FLAG_KEYS)
    known = ("kv_policy", "kv_pin", *numbers, *HINT_KEYS)
    asked = {}
    for key, value in (extra_args or {}).items():
        if key in known:
            asked[key] = value
        elif key.startswith("kv_") and key not in _VLLM_REQUEST_KEYS:
            what = f"unknown key {shown(key)}{nearest(key, known)}"
            if key[3:] in VALID_KEYS:
                what = f"server's own key {shown(key)}"
            raise ValueError(
                f"vllm_xargs: got the {what}, expected one of {', '.join(known)}"
            )
    return asked


def with_server_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """Move what `policy_config` says about the server itself to keys of its own.

    Raises:
        ValueError: a key is given in both places, or the trace has no folder.
    """
    moved, options = dict(values), values.get("policy_config")
    if isinstance(options, Mapping):
        for option, key in SERVER_OPTIONS.items():
            if options.get(option) is None:
                continue
            if moved.get(key, []) != []:
                raise ValueError(
                    f"{key}: given twice, here and as {option} in policy_config"
                )
            moved[key] = options[option]
        moved["policy_config"] = {
            key: value for key, value in options.items() if key not in SERVER_OPTIONS
        }
    if "trace_dir" in moved:
        moved["trace_dir"] = trace_folder(moved["trace_dir"])
    return moved
