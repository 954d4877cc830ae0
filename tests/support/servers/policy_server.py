"""A server with a policy that has no model: it answers and counts, or does so wrongly.

Called by the tests of `vllm-kvpolicy verify URL`.
"""

from collections import Counter
from contextlib import AbstractContextManager

from aiohttp import web

from support.servers.running_server import serve_handlers
from vllm_kvpolicy.observe.metrics import SERIES

FAULTS = (
    "answers change at once",  # with the policy, before any event
    "answers change beside others",
    "returns nothing",
    "leaks",
    "miscounts",
    "has no policy",
    "does not repeat itself",
    "is asked by others",
    "others run",
    "counts elsewhere",  # as a host whose requests other hosts answer
    "dies in an event",
    "is no vLLM",
)
BUDGET, INTERVAL = 256, 64
KEEP_ALL = ("identity", "quest")


class PolicyServer:
    """Drops 32 tokens at each event, one for each INTERVAL tokens after the budget.

    Args:
        faults: of FAULTS.
        policy: that it has; those of KEEP_ALL drop nothing.
        budget: its own, the largest of a request.
        least: the smallest budget of a request.
        longest: tokens of a request, at most.
        api_key: that it asks for.
    """

    def __init__(
        self,
        *faults: str,
        policy: str = "ams-tova",
        budget: int = BUDGET,
        least: int = 0,
        longest: int = 4096,
        api_key: str | None = None,
    ) -> None:
        assert set(faults) <= set(FAULTS)
        self.faults, self.policy, self.api_key = faults, policy, api_key
        self.budget, self.least, self.longest = budget, least, longest
        before = {"requests": 5, "events": 3, "tokens_dropped": 96}  # of other clients
        self.counts = Counter(before, blocks_returned=3)
        self.bodies: list[dict] = []
        self.running = 0

    async def complete(self, request: web.Request) -> web.Response:
        """Answer one request."""
        if self.api_key and request.headers.get("Authorization") != (
            f"Bearer {self.api_key}"
        ):
            return web.Response(status=401, text="no")
        body = await request.json()
        keys = body["vllm_xargs"]
        if (
            keys.get("kv_budget", 0) > self.budget
            or keys.get("kv_interval", 0) > INTERVAL
        ):
            return web.Response(status=400, text="expected at most the server's")
        if keys.get("kv_budget", self.least) < self.least:
            told = f"kv_budget: expected at least {self.least} tokens"
            return web.Response(status=400, text=told)
        if keys.get("kv_policy", "none") != "none":
            told = f"kv_policy: expected one that the server allows: '{self.policy}'"
            return web.Response(status=400, text=told)
        self.bodies.append(body)
        events = self._count(body, keys)
        if events and "dies in an event" in self.faults:
            return web.Response(status=500, text="engine is dead")
        is_off = keys.get("kv_policy") == "none"
        tokens = [self._first(body, is_off), *range(body["max_tokens"] - 1)]
        answer: dict = {"choices": [{"token_ids": tokens}]}
        if not is_off:
            said = [[200 + index, 32, self.budget] for index in range(events)]
            answer["kv_transfer_params"] = {"kv_policy": {"dropped": said}}
        return web.json_response(answer)

    def _first(self, body: dict, is_off: bool) -> int:
        """Return the first token: of the prompt, or of what goes wrong."""
        first = len(body["prompt"])
        if "answers change at once" in self.faults and not is_off:
            first += 1
        if "answers change beside others" in self.faults and not is_off:
            first += len(self.bodies)
        if "does not repeat itself" in self.faults:
            first += len(self.bodies)
        return first

    def _count(self, body: dict, keys: dict) -> int:
        """Count a request; return its events."""
        total = body["truncate_prompt_tokens"] + body["max_tokens"]
        room = total - keys.get("kv_budget", self.budget)
        events = 0 if keys.get("kv_policy") == "none" else max(0, room // INTERVAL)
        if "counts elsewhere" not in self.faults:
            self.counts["requests"] += 1 + ("is asked by others" in self.faults)
        self.counts["events"] += events * (1 + ("miscounts" in self.faults))
        if self.policy not in KEEP_ALL:
            self.counts["tokens_dropped"] += 32 * events
            if "returns nothing" not in self.faults:
                self.counts["blocks_returned"] += events
        return events

    async def models(self, request: web.Request) -> web.Response:
        model = {"id": "made", "max_model_len": self.longest}
        return web.json_response(
            {} if "is no vLLM" in self.faults else {"data": [model]}
        )

    async def metrics(self, request: web.Request) -> web.Response:
        lines = []
        for series in () if "has no policy" in self.faults else SERIES:
            value = self.counts[series.name]
            if series.name == "local_blocks":
                value = int("leaks" in self.faults)
            ending = "_total" if series.kind == "counter" else ""
            lines.append(f"# TYPE kvpolicy_{series.name}{ending} {series.kind}")
            # Two engines behind one server: what counts is their sum.
            for engine, own in enumerate((value // 2, value - value // 2)):
                name = f"kvpolicy_{series.name}{ending}"
                lines.append(f'{name}{{engine="{engine}"}} {own}')
        lines.append("# TYPE vllm:num_requests_running gauge")
        lines.append(f"vllm:num_requests_running {int('others run' in self.faults)}")
        return web.Response(text="\n".join(lines) + "\n")


async def _version(request: web.Request) -> web.Response:
    return web.json_response({"version": "0.32.0"})


def serve(fake: PolicyServer) -> AbstractContextManager[str]:
    more = {"/v1/models": fake.models, "/version": _version}
    return serve_handlers("/v1/completions", fake.complete, fake.metrics, more)
