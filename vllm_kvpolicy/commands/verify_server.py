"""Checks a running server: what its answers and its metrics say of requests of ours."""

import re
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from vllm_kvpolicy.commands import judge
from vllm_kvpolicy.commands.judge import FAILED, Answer, Check, text
from vllm_kvpolicy.commands.servers import NOT_VALID, Client, Refused, part
from vllm_kvpolicy.config import CONFIG_KEY, PER_REQUEST_OFF
from vllm_kvpolicy.observe.metrics import SERIES
from vllm_kvpolicy.policies.names import TESTS, keeps_all

OFF = {"kv_policy": PER_REQUEST_OFF}
SMALL = {"kv_budget": 128, "kv_interval": 64}
UNKNOWN = {"kv_policy": "?"}  # a server that refuses it tells which policy it has
# In the server's messages.
LEAST = re.compile(r"expected at least (\d+)")
OWN_POLICY = re.compile(r"the server allows: '([^']+)'")
NUM_REQUESTS = 2
Lengths = tuple[int, int]  # tokens of prompt and answer
SHORT = 24, 24
LONG = 400, 96
LONGER = 400, 288  # where a kept prompt does not count
ANSWER_SECONDS = 120
SETTLE_SECONDS = 10
COUNT_SECONDS = 1  # after which metrics have what has been answered


@dataclass(frozen=True)
class Asked:
    """Answers to a few requests, and how much the counters grew over them."""

    answers: list[Answer]
    grown: dict[str, float]


class Server:
    """A server that is running.

    Args:
        url: its root.

    Attributes:
        longest: tokens of a request, at most.
        policy: name of what it runs with; None where it does not say.
        answers: all that it has given since `start`.
        start: its counters before.

    Raises:
        ValueError: it does not answer as vLLM does, or serves without a policy.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        client = Client(url, api_key, ANSWER_SECONDS)
        self.url, self._fetch = client.url, client.fetch
        models = self._fetch("/v1/models")
        self.model: str = part(models, "data", 0, "id")
        self.longest: int = part(models, "data", 0, "max_model_len")
        if self.longest < sum(LONG):
            raise ValueError(
                f"{self.url}: max_model_len: got {self.longest}, expected at least "
                f"{sum(LONG)} tokens for a request that has an event"
            )
        self.version: str = part(self._fetch("/version"), "version")
        self.start = self.counters()
        self.answers: list[Answer] = []
        found = OWN_POLICY.search(self._refusal(UNKNOWN) or "")
        self.policy = None if found is None else found[1]

    def counters(self) -> dict[str, float]:
        """Return the server's counters, summed over its engines.

        Raises:
            ValueError: it has none.
        """
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(self._fetch("/metrics")):
            for sample in family.samples:
                name = sample.name.removeprefix("kvpolicy_").removesuffix("_total")
                found[name] = found.get(name, 0.0) + sample.value
        if missing := [each.name for each in SERIES if each.name not in found]:
            raise ValueError(
                f"{self.url}/metrics has no kvpolicy_{missing[0]}: expected a server "
                "with --kv-policy"
            )
        return found

    def ask(
        self, lengths: Lengths, keys: Mapping[str, Any], at_once: bool = True
    ) -> Asked:
        """Send requests and wait for their answers.

        Args:
            lengths: tokens of a prompt and of its answer.
            keys: `vllm_xargs` of each request.
            at_once: send all before the first is answered.

        Raises:
            ValueError: the server refuses one.
        """

        def one(seed: int) -> Answer:
            return self._ask_one(seed, lengths, keys)

        before = self.counters()
        with ThreadPoolExecutor(NUM_REQUESTS if at_once else 1) as pool:
            found = list(pool.map(one, range(NUM_REQUESTS)))
        self.answers += found
        return Asked(found, judge.growth(before, self.counters()))

    def _ask_one(self, seed: int, lengths: Lengths, keys: Mapping[str, Any]) -> Answer:
        prompt_tokens, output_tokens = lengths
        body = {
            "model": self.model,
            "prompt": text(seed, prompt_tokens),
            "truncate_prompt_tokens": prompt_tokens,
            "max_tokens": output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "vllm_xargs": dict(keys),
        }
        answer = self._fetch("/v1/completions", body)
        said = (part(answer).get("kv_transfer_params") or {}).get(CONFIG_KEY)
        events = None if said is None else len(said["dropped"])
        if said is None and keys == OFF:
            events = 0
        return Answer(tuple(part(answer, "choices", 0, "token_ids")), events)

    def _refusal(self, keys: Mapping[str, Any]) -> str | None:
        """Return what the server says against these keys; None where it takes them."""
        try:
            self.answers.append(self._ask_one(0, (SHORT[0], 1), keys))
        except Refused as error:
            if error.status != NOT_VALID:
                raise
            return str(error)
        return None

    def smaller(self) -> dict[str, int]:
        """Return `SMALL`, or the least that the server lets a request have.

        What it refuses for another reason is left out: its own value is smaller still,
        or nothing reads it.
        """
        taken = {}
        for key, value in SMALL.items():
            refusal = self._refusal({key: value})
            if refusal is not None and (least := LEAST.search(refusal)):
                value = int(least[1])
                refusal = self._refusal({key: value})
            if refusal is None:
                taken[key] = value
        return taken

    def others(self) -> int:
        """Return how many requests of others ran since `start`.

        Those that have ended, aborted ones as well, and those that run now. Below 0
        where the metrics are not of all engines that answered.
        """
        deadline = time.monotonic() + COUNT_SECONDS
        while True:
            now = self.counters()
            ended = now["requests"] - self.start["requests"] - len(self.answers)
            running = now.get("vllm:num_requests_running", 0.0)
            if not (ended or running) or time.monotonic() > deadline:
                return round(ended + running)
            time.sleep(0.1)

    def num_held(self) -> int:
        """Return the superblocks that are held, once they get no fewer any more."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while True:
            found = self.counters()
            held = round(found["local_blocks"] + found["global_blocks"])
            used = found.get("vllm:kv_cache_usage_perc", 0.0)
            if not (held or used) or time.monotonic() > deadline:
                return max(held, int(used > 0))
            time.sleep(0.2)


def checks(server: Server) -> Iterator[Check]:
    """Ask a server and yield what was found; requests of others leave it open."""

    def judged() -> Iterator[Check]:
        for check in _checks(server):
            yield judge.left_open(check, _told_of(server.others()))

    return judge.until_stopped("the server answers", judged())


def _told_of(others: int) -> str | None:
    if others > 0:
        return f"{others} other requests used the server"
    return f"{-others} of our requests are not in its metrics" if others else None


def _checks(server: Server) -> Iterator[Check]:
    """Yield what was found, as if nobody else used the server."""
    keys = server.smaller()
    lengths = LONG
    found = server.ask(lengths, keys)
    if not found.grown["events"] and server.longest >= sum(LONGER):
        lengths = LONGER
        found = server.ask(lengths, keys)
    whole = server.ask(lengths, OFF)
    repeats = server.ask(lengths, OFF, at_once=False).answers == whole.answers

    def same(name: str, expected: Asked, found: Asked, has_events: bool) -> Check:
        some = expected.answers, found.answers, found.grown
        check = judge.same_tokens(name, *some, has_events=has_events)
        if repeats or check.result != FAILED:
            return check
        why = "full KV caches do not give the same twice either"
        return judge.left_open(check, why)

    name = "before their first event requests have the answers of the full KV cache"
    early = server.ask(SHORT, {})
    check = same(name, server.ask(SHORT, OFF), early, False)
    some = f"requests of {sum(SHORT)} tokens have events here"
    yield judge.left_open(check, some if early.grown["events"] else None)
    none = f"requests of {sum(lengths)} tokens have no event here"
    why = None if found.grown["events"] else none
    if server.policy in TESTS:
        name = "tokens that were moved give the answers of the full KV cache"
        yield judge.left_open(same(name, whole, found, True), why)
    else:
        check = judge.memory_returns(found.grown)
        yield judge.left_open(check, why or _may_keep_all(server.policy))
    alone = server.ask(lengths, keys, at_once=False)
    check = same("requests are answered alone as beside others", found, alone, True)
    yield judge.left_open(check, why)
    yield judge.pool_is_free("server", server.num_held())
    grown = judge.growth(server.start, server.counters())
    yield judge.counters_agree("server", server.answers, grown)


def _may_keep_all(policy: str | None) -> str | None:
    """Return why a policy need not drop tokens at an event."""
    if policy is None:
        return "the server does not tell its policy"
    return "without a scorer it may keep every token" if keeps_all(policy) else None
