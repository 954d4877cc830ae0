"""The configuration of a server or a request, from plain data and back.

Built from flags, YAML, `additional_config` or keyword arguments in the API process;
rebuilt from `VllmConfig.additional_config["kv_policy"]` by scheduler and worker. Keys
of the plain form are the flags without their prefix: `--kv-budget` is `budget`.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import InitVar, dataclass, field, replace
from typing import Any

from vllm_kvpolicy.config_keys import (
    ALWAYS,
    AUTO,
    DEFAULT_PREFILL_INTERVAL,
    DEFAULT_RECENT,
    DEFAULT_SINKS,
    FLAG_KEYS,
    HINT_KEYS,
    INTEGER_KEYS,
    LEAST_AUTO,
    NONE,
    PRESSURE,
    PROMPT,
    SERVER_OPTIONS,
    SWITCHES,
    SYSTEM,
    VALID_KEYS,
    check_pin,
    nearest,
    request_keys,
    share_of,
    shown,
    trace_folder,
    with_server_options,
    wrong,
)
from vllm_kvpolicy.events import NO_STEP, EventPlan, Footprint
from vllm_kvpolicy.hints import NO_HINTS, Hints, read_hints
from vllm_kvpolicy.policies.names import ResolvedPolicy, grammar, parse, resolve

CONFIG_KEY = "kv_policy"
PER_REQUEST_OFF = "none"


@dataclass(frozen=True)
class KVPolicyConfig:
    """What a server, or one request, keeps. Tokens are counted per KV head.

    Flags and options are in docs/flags.md; below is what they do not say.

    A new object checks every value. `with_request` makes the configuration of a request
    from that of its server, and checks only what the request changes. A wrong value is
    a ValueError that names its key, the value and what is valid.

    Args:
        budget_tokens: K; AUTO becomes the least that it may stand for, until the pool
            is known, and a share of each request what it is of the longest, see
            `sizes.settled`. Of this and the other integers `INTEGER_KEYS` says what
            they are.
        pin: first tokens of a prompt that stay in their superblocks, shared and cached,
            while K counts what is kept behind them: NONE, SYSTEM for those of system
            messages and tools of a chat, PROMPT for all, or how many; None leaves it to
            the policy.
        events: by default PRESSURE, but ALWAYS where there is no budget to stop at, or
            with a `preset`, which stands for a paper's own settings.
        ceiling_tokens: C, with PRESSURE held right after an event that comes because
            the request holds C + I; None for no such events.
        options: of the policies, as the user gave them; each policy reads its own.
        spread_events: events in decoding come up to an interval early, each request's
            by its own phase, so that those of many requests fall on many steps.
    """

    policy: str
    budget_tokens: int = 2048
    interval_tokens: int = 512
    recent_tokens: int = DEFAULT_RECENT
    sink_tokens: int = DEFAULT_SINKS
    prefill_interval_tokens: int | str | None = None
    events_per_step: int | None = None
    pin: str | int | None = None
    allow: tuple[str, ...] = ()
    events: str | None = None
    ceiling_tokens: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    trace_dir: str | None = None
    spread_events: bool = True
    report_events: bool = False
    hints: bool = False
    live: bool = False
    live_text: bool = False
    # What a request says; not a key.
    hinted: Hints = NO_HINTS
    # What the user gave in place of a number: AUTO, or a share; not a key.
    budget_word: str | None = None
    # By policy name: what follows from `options`, made once and shared with requests.
    _resolved: dict[str, ResolvedPolicy] = field(
        default_factory=dict, repr=False, compare=False
    )
    # Not a value of the configuration: whether its values have been checked before.
    is_checked: InitVar[bool] = False

    def __post_init__(self, is_checked: bool) -> None:
        if not is_checked:
            object.__setattr__(self, "_resolved", {})
            given: Any = self.budget_tokens
            if given == AUTO or share_of(given):
                object.__setattr__(self, "budget_word", given)
                object.__setattr__(self, "budget_tokens", LEAST_AUTO)
            self._check()

    def _check(self) -> None:
        """Check every value, alone and together with the others.

        What depends on the block size is left to `validate_block_size`.

        Raises:
            ValueError: naming the key, its value and what is valid.
        """
        if not isinstance(self.options, Mapping):
            raise wrong("policy_config", self.options, "a mapping of options")
        if not isinstance(self.allow, tuple):
            raise wrong("allow", self.allow, "a tuple of names")
        _check_allowed(self.policy, self.allow)
        _check_known(self.options, self.policies)
        for number in INTEGER_KEYS:
            value = getattr(self, number.field)
            if value is not None or getattr(KVPolicyConfig, number.field) is not None:
                number.check(value)
        check_pin("pin", self.pin)
        trace_folder(self.trace_dir)
        for key in SWITCHES:
            if not isinstance(getattr(self, key), bool):
                raise wrong(key, getattr(self, key), "true or false")
        if self.live_text and not self.live:
            raise ValueError("live_text: got true, expected live to be true as well")
        self._check_windows(self.policy)
        self._check_pin("pin")
        self._check_events()

    def _check_events(self) -> None:
        """Check when events come, with the policies and the budget; set the default.

        Raises:
            ValueError: no budget could be a floor, or the pool does not tell AUTO.
        """
        own = self.resolved()
        if self.events is None:
            is_paper = own.options.get("preset", "default") != "default"
            events = ALWAYS if own.info.keeps_all or is_paper else PRESSURE
            object.__setattr__(self, "events", events)
        if self.events not in (ALWAYS, PRESSURE):
            raise wrong("events", self.events, f"{ALWAYS!r} or {PRESSURE!r}")
        asked: dict[str, Any] = {
            "events": PRESSURE if self.events == PRESSURE else None,
            "budget": self.budget_word,
            "ceiling": self.ceiling_tokens,
        }
        for key, value in asked.items():
            if own.info.keeps_all and value is not None:
                raise ValueError(
                    f"{key}: got {value!r} with {self.policy!r}, which has no budget "
                    "to stop at, expected none, or a policy with a scorer"
                )
        self._check_ceiling("ceiling", 1)
        if self.is_auto and self.events == ALWAYS:
            raise ValueError(
                f"budget: got {AUTO!r} with events {ALWAYS!r}, expected a number, or "
                f"events {PRESSURE!r}: what {ALWAYS!r} keeps of a request must not "
                "depend on the pool"
            )

    def _check_pin(self, key: str) -> None:
        """Raise ValueError where tokens are masked as soon as they are dropped."""
        if self.pin not in (None, NONE, 0) and self.resolved().is_exact:
            raise ValueError(
                f"{key}: got {self.pin!r} with {self.policy!r} and `exact`, which "
                f"masks pinned tokens, too; expected {NONE!r}, or `exact` false"
            )

    def _read_hints(self, asked: Mapping[str, Any], policy_name: str) -> Hints:
        """Read a request's hints; ValueError where they could not be followed."""
        own, key = self.resolved(policy_name), next(k for k in HINT_KEYS if k in asked)
        if not self.hints:
            expected = "none, or a server with `hints` true in --kv-policy-config"
        elif own.is_exact:
            expected = f"none with {policy_name!r} and `exact`: it masks tokens itself"
        elif own.info.keeps_all and own.info.admission is None:
            expected = f"none with {policy_name!r}, which drops nothing"
        else:
            return read_hints(asked)
        raise wrong(key, asked[key], expected)

    def _check_ceiling(self, key: str, page_tokens: int) -> None:
        """Raise ValueError unless a ceiling is above the floor, and has an effect."""
        ceiling = self.ceiling_tokens
        if ceiling is None:
            return
        if self.events == ALWAYS:
            raise ValueError(
                f"{key}: got {ceiling} with events {ALWAYS!r}, which cut to the budget "
                f"alone, expected none, or events {PRESSURE!r}"
            )
        # A floor that is no number of the user's is kept below the ceiling.
        floor = 0 if self.budget_word else self.budget_tokens
        if ceiling < max(floor, self.least_budget(page_tokens)):
            raise ValueError(
                f"{key}: got {ceiling}, expected at least the budget, "
                f"{self.budget_tokens}, and at least sinks, recent and one page, "
                f"{self.least_budget(page_tokens)}"
            )

    @property
    def is_auto(self) -> bool:
        return self.budget_word == AUTO

    @property
    def budget_share(self) -> float | None:
        """The budget as a share of each request, above 0 to 1."""
        return share_of(self.budget_word)

    def smallest_budget(self, page_tokens: int) -> int:
        """Return the smallest budget of requests that do not ask for another."""
        if self.budget_share is None:
            return self.budget_tokens
        return min(self.least_budget(page_tokens), self.budget_tokens)

    @property
    def policies(self) -> tuple[str, ...]:
        """Every policy that a request may have: the server's own, then `allow`."""
        return (self.policy, *(name for name in self.allow if name != self.policy))

    @property
    def is_ragged(self) -> bool:
        """Whether heads may hold different numbers of tokens under any policy."""
        return any(each.is_ragged for each in self.all_resolved)

    @property
    def is_exact(self) -> bool:
        """Whether a dropped token is masked at once instead of at the next event."""
        return any(each.is_exact for each in self.all_resolved)

    @property
    def all_resolved(self) -> list[ResolvedPolicy]:
        return [self.resolved(name) for name in self.policies]

    @property
    def words(self) -> list[Any]:
        return [word for each in self.all_resolved for word in each.info.parts]

    def resolved(self, policy_name: str | None = None) -> ResolvedPolicy:
        """Return one of `policies`, the server's own by default, with all its options.

        Raises:
            ValueError: a value outside its range, or none where one is required.
        """
        name = policy_name or self.policy
        if name not in self._resolved:
            info = parse(name)
            known = info.options
            given = {key: value for key, value in self.options.items() if key in known}
            preset = str(given.get("preset"))
            if preset in parse(self.policy).presets and preset not in info.presets:
                del given["preset"]  # it is the server's own policy's
            self._resolved[name] = resolve(info, given)
        return self._resolved[name]

    def prefill_step(self, block_size: int) -> int:
        """Return the tokens between two events inside a prompt, NO_STEP for none."""
        default = max(DEFAULT_PREFILL_INTERVAL // block_size, 1) * block_size
        tokens = self.prefill_interval_tokens or default
        return tokens if isinstance(tokens, int) else NO_STEP

    def _check_windows(self, policy_name: str, prefix: str = "", size: int = 1) -> None:
        """Raise ValueError where a policy's query window is longer than an interval."""
        window = self.resolved(policy_name).window_tokens
        intervals = {
            "interval": self.interval_tokens,
            "prefill_interval": self.prefill_step(size),
        }
        for key, tokens in intervals.items():
            if tokens < window:
                least = f"at least {window} tokens, the query window of {policy_name!r}"
                raise wrong(prefix + key, tokens, least)

    @property
    def pins(self) -> str | int:
        """What is pinned: as the user says, else as the policy does."""
        own = self.resolved()
        if own.is_exact:
            return NONE
        default = PROMPT if own.info.pins_prompt else NONE
        return default if self.pin is None else self.pin

    def pinned_tokens(self, prompt_tokens: int) -> int:
        """Return how many tokens of a prompt are pinned, whole superblocks or not.

        SYSTEM stands for none: where a chat has such messages, the API process has put
        their number in its place.
        """
        words = {NONE: 0, SYSTEM: 0, PROMPT: prompt_tokens}
        wanted = self.pins
        tokens = wanted if isinstance(wanted, int) else words[wanted]
        return min(tokens, prompt_tokens)

    def hints_of(self, prompt_tokens: int, block_size: int) -> Hints:
        """Return the hints of a request, as far as its budget has room for them."""
        room: float = self.budget_tokens - self.least_budget(block_size)
        room = math.inf if self.resolved().info.is_unbounded else room
        first = max(self.pinned_tokens(prompt_tokens), self.sink_tokens)
        return self.hinted.fitted(first, room)

    def footprint(
        self, prompt_tokens: int, block_size: int, query_rows: int, phase: int = 0
    ) -> Footprint:
        """Return when a request has events and what it holds between them.

        Args:
            prompt_tokens: the budget counts what is kept behind the pinned ones.
            query_rows: rows of a superblock that a query takes, of its 2N; see `sizes`.
            phase: of the request, see `events`; 0 where events are not spread.
        """
        pinned = self.pinned_tokens(prompt_tokens)
        policy, budget = self.resolved(), self.budget_tokens + pinned
        if policy.info.is_unbounded:
            # Events begin when the first page has left the window.
            first = max(self.sink_tokens, pinned)
            budget = first + self.recent_tokens + block_size
        window = policy.window_tokens
        events = EventPlan(
            prompt_len=prompt_tokens,
            budget=budget,
            interval=self.interval_tokens,
            prefill_interval=self.prefill_step(block_size),
            phase=phase if self.spread_events else 0,
            window_tokens=window,
        )
        window_blocks = -(-window * query_rows // (2 * block_size))
        sizes = self.recent_tokens, block_size, policy.info.keeps_all
        return Footprint(events, *sizes, window_blocks, pinned // block_size)

    @classmethod
    def from_dict(cls, values: Any) -> "KVPolicyConfig":
        """Build a configuration from its plain form.

        Args:
            values: keys of `VALID_KEYS`; only `policy` is needed. None as a value
                stands for the default.

        Raises:
            ValueError: not a mapping, an unknown key, no policy, or a bad value.
        """
        if not isinstance(values, Mapping):
            expected = f"a mapping with keys {', '.join(VALID_KEYS)}"
            raise wrong(CONFIG_KEY, values, expected)
        for key in values:
            if key not in VALID_KEYS:
                raise ValueError(
                    f"{CONFIG_KEY}: got the unknown key {shown(key)}"
                    f"{nearest(str(key), VALID_KEYS)}, expected one of "
                    f"{', '.join(VALID_KEYS)}"
                )
        given = {key: value for key, value in values.items() if value is not None}
        given = with_server_options(given)
        if "policy" not in given:
            raise ValueError(
                f"policy: missing (got {', '.join(given) or 'no keys'}), expected as "
                f"--kv-policy {grammar()}"
            )
        options = given.get("policy_config", {})
        if isinstance(options, Mapping):
            given["policy_config"] = dict(options)
        allow = given.get("allow", ())
        if isinstance(allow, str) or not isinstance(allow, Iterable):
            raise wrong("allow", allow, "a list of policies")
        given["allow"] = tuple(allow)
        fields = {"policy_config": "options"} | {k.key: k.field for k in INTEGER_KEYS}
        return cls(**{fields.get(key, key): value for key, value in given.items()})

    def to_dict(self) -> dict[str, Any]:
        """Return the plain form: JSON-able, and `from_dict` makes an equal object."""
        values: dict[str, Any] = {"policy": self.policy}
        values |= {key.key: getattr(self, key.field) for key in INTEGER_KEYS}
        values |= {"budget": self.budget_word} if self.budget_word else {}
        values |= {"policy_config": dict(self.options), "allow": list(self.allow)}
        values |= {"events": self.events, "pin": self.pin}
        values |= {"trace_dir": self.trace_dir}
        return values | {key: getattr(self, key) for key in SWITCHES}

    def validate_block_size(self, block_size: int) -> None:
        """Check what depends on N, tokens per superblock, and the policies of `allow`.

        Raises:
            ValueError: the budget has no room for a page after the tokens that are
                always kept, or prompts cannot be cut at whole superblocks.
        """
        self._check_budget("budget", block_size)
        self._check_ceiling("ceiling", block_size)
        for name in self.policies:
            self._check_windows(name, size=block_size)
        tokens = self.prefill_interval_tokens
        if isinstance(tokens, int) and tokens % block_size:
            expected = f"a multiple of the block size {block_size}"
            raise wrong("prefill_interval", tokens, expected)

    def with_request(
        self,
        extra_args: Mapping[str, Any] | None,
        block_size: int = 1,
        lengths: tuple[int, int] | None = None,
    ) -> "KVPolicyConfig | None":
        """Apply what one request asks for in `vllm_xargs`, its `extra_args`.

        Known keys: `kv_policy` (`none`, or one of `policies`), `kv_pin`, HINT_KEYS,
        `kv_budget`, `kv_interval`, `kv_ceiling`, `kv_recent` and `kv_sinks`. Each of
        the last five is at most the server's, because the server sized its memory for
        those. Keys that do not begin with `kv_` are not looked at.

        Args:
            lengths: tokens of the prompt, and of prompt and answer limit, of which a
                budget may be a share; None where they are not known, for the server's
                budget.

        Returns:
            The request's configuration, or None where it asks for the full KV cache.

        Raises:
            ValueError: an unknown key that begins with `kv_`, or a bad value.
        """
        asked = request_keys(extra_args)
        check_pin("kv_pin", asked.get("kv_pin", NONE), of_request=True)
        policy_name = asked.pop("kv_policy", self.policy)
        if policy_name == PER_REQUEST_OFF and not asked:
            return None
        if policy_name == PER_REQUEST_OFF:
            raise ValueError(
                f"{next(iter(asked))}: has no effect with kv_policy 'none'; leave "
                "one of them out"
            )
        if policy_name not in self.policies:
            allowed = ", ".join(map(repr, self.policies))
            expected = f"'none' or one that the server allows: {allowed} (see `allow`)"
            raise wrong("kv_policy", policy_name, expected)
        changes: dict[str, Any] = {}
        if policy_name != self.policy:
            changes = {"policy": policy_name, "allow": self.policies}
        if "kv_pin" in asked:
            changes["pin"] = asked["kv_pin"]
        if any(key in asked for key in HINT_KEYS):
            changes["hinted"] = self._read_hints(asked, policy_name)
        changes |= self._asked_numbers(asked, policy_name)
        share = share_of(asked.get("kv_budget"))
        if "kv_budget" not in asked:
            fixed = self.resolved(policy_name).info.fixed_keys
            share = None if "budget" in fixed else self.budget_share
        if not changes:
            return self._shared(share, lengths, block_size)
        config = replace(self, is_checked=True, **changes)
        if "kv_pin" in asked:
            config._check_pin("kv_pin")
        config._check_windows(policy_name, prefix="kv_")
        config = config._shared(share, lengths, block_size)
        config._check_budget("kv_budget", block_size)
        config._check_ceiling("kv_ceiling", block_size)
        return config

    def _asked_numbers(
        self, asked: Mapping[str, Any], policy_name: str
    ) -> dict[str, int]:
        """Return the integers that a request asks for by field, but for a share."""
        changes: dict[str, int] = {}
        for key in FLAG_KEYS:
            label = f"kv_{key.key}"
            if label not in asked:
                continue
            limit = getattr(self, key.field)
            value = key.check(asked[label], label, of_request=True)
            why = self.resolved(policy_name).info.fixed_keys.get(key.key)
            reason = f": {policy_name!r} {why}" if why else ""
            if isinstance(value, str):
                if why:
                    raise wrong(label, value, "none" + reason)
                continue
            changes[key.field] = value
            limit = value if limit is None else limit
            if value > limit or (why and value < limit):
                wanted = f"{'' if why else 'at most '}the server's {limit}"
                raise wrong(label, value, wanted + reason)
        if self.is_auto and "ceiling_tokens" in changes:
            floor = changes.get("budget_tokens", self.budget_tokens)
            changes["budget_tokens"] = min(floor, changes["ceiling_tokens"])
        return changes

    def _shared(
        self, share: float | None, lengths: tuple[int, int] | None, page_tokens: int
    ) -> "KVPolicyConfig":
        """Return the same with a budget that is a share of what is not pinned.

        At least what is always kept, and at most the server's budget and the ceiling.

        Args:
            share: None leaves the budget as it is.
            lengths: see `with_request`.
        """
        if share is None:
            return self
        floor = most = min(
            self.budget_tokens, self.ceiling_tokens or self.budget_tokens
        )
        if lengths is not None:
            prompt, whole = lengths
            wanted = int(share * (whole - self.pinned_tokens(prompt)))
            floor = min(max(wanted, self.least_budget(page_tokens)), most)
        return self if floor == self.budget_tokens else self.with_budget(floor)

    def with_budget(self, tokens: int) -> "KVPolicyConfig":
        """Return the same with a number in place of AUTO or a share."""
        return replace(self, is_checked=True, budget_tokens=tokens)

    def least_budget(self, page_tokens: int) -> int:
        """Return the tokens that are always kept, and room for a page.

        For example 4 sinks and 32 recent tokens need a budget of 68 with pages of 32.
        """
        return self.sink_tokens + self.recent_tokens + page_tokens

    def _check_budget(self, key: str, page_tokens: int) -> None:
        """Raise ValueError unless the always-kept tokens leave room for a page."""
        if self.resolved().info.is_unbounded:
            return
        sinks, recent = self.sink_tokens, self.recent_tokens
        least = self.least_budget(page_tokens)
        if self.budget_tokens < least:
            page = f"one page of {page_tokens}" if page_tokens > 1 else "one page"
            parts = f"{sinks} sinks + {recent} recent + {page}"
            raise wrong(key, self.budget_tokens, f"at least {least} tokens ({parts})")


def _check_allowed(policy_name: str, allow: tuple[str, ...]) -> None:
    """Raise ValueError for an unknown name, or a test policy among several."""
    infos = [parse(policy_name), *(parse(name, key="allow") for name in allow)]
    tests = [info.name for info in infos if info.is_test]
    if allow and tests:
        raise ValueError(
            f"allow: got the test policy {tests[0]!r} with others, expected it alone"
        )


def _check_known(options: Mapping[str, Any], policies: Iterable[str]) -> None:
    known = {key: None for name in policies for key in parse(name).options}
    listed, names = ", ".join(known) or "none", ", ".join(map(repr, policies))
    for key in options:
        if key not in known:
            raise ValueError(
                f"kv_policy_config: got the unknown key {shown(key)}"
                f"{nearest(key, [*known, *SERVER_OPTIONS])}, expected a key of {names} "
                f"({listed}), or {', '.join(SERVER_OPTIONS)}"
            )
