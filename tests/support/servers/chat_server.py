r"""A server of chat completions that can do everything wrong.

Called by the tests of the accuracy client. The answer to a prompt is `\boxed{PROMPT}`,
unless `answers` has another. Faults are given per prompt, one for each try; after the
last of them every try is answered.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

from aiohttp import web

from support.servers.running_server import counters_text, serve_handlers


class ChatServer:
    """Counts tries and answers by prompt.

    Args:
        faults: by prompt: an HTTP status, or one of `reset`, `stall`, `cut_body`,
            `bad_json`, `no_choices`, `aborted`, `capped`.
        answers: by prompt, texts that differ from the default.
        says: by prompt, `kv_transfer_params` of the answer.

    Attributes:
        has_policies: whether /metrics counts events.
        floor: tokens below which no called event cuts, 0 where none is called.
    """

    def __init__(
        self,
        faults: Mapping[str, Sequence[int | str]] | None = None,
        answers: Mapping[str, str] | None = None,
        says: Mapping[str, dict] | None = None,
    ) -> None:
        self.faults = {prompt: list(some) for prompt, some in (faults or {}).items()}
        self.answers = dict(answers or {})
        self.says = dict(says or {})
        self.has_policies, self.floor = True, 0
        self.tries: Counter[str] = Counter()
        self.bodies: list[dict] = []
        self.at_once = self.most_at_once = 0

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """Answer one request, or fail as told."""
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await asyncio.sleep(0.005)
            return await self._chat(request)
        finally:
            self.at_once -= 1

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        prompt = body["messages"][0]["content"]
        self.tries[prompt] += 1
        left = self.faults.get(prompt)
        fault = left.pop(0) if left else None
        if isinstance(fault, int):
            headers = {"Retry-After": "0"} if fault == 429 else {}
            return web.Response(status=fault, text=f"fault {fault}", headers=headers)
        if fault == "stall":
            await asyncio.sleep(60)
        if fault == "reset":
            assert request.transport is not None
            request.transport.abort()
        reason = {"capped": "length", "aborted": "abort"}.get(str(fault), "stop")
        text = self.answers.get(prompt, f"\\boxed{{{prompt}}}")
        choice = {"message": {"content": text}, "finish_reason": reason}
        choice["token_ids"] = [ord(letter) for letter in text]
        usage = {"prompt_tokens": 40, "completion_tokens": len(text)}
        said = {"kv_transfer_params": self.says.get(prompt)}
        whole = {"choices": [choice], "usage": usage, **said}
        if fault == "no_choices":
            whole = {"usage": usage}
        data = json.dumps(whole).encode()
        if fault == "bad_json":
            return web.Response(body=data[:-9], content_type="application/json")
        if fault == "cut_body":
            headers = {"Content-Length": str(len(data))}
            response = web.StreamResponse(headers=headers)
            response.content_type = "application/json"
            await response.prepare(request)
            await response.write(data[: len(data) // 2])
            assert request.transport is not None
            request.transport.close()
            return response
        return web.Response(body=data, content_type="application/json")

    async def metrics(self, request: web.Request) -> web.Response:
        """Count what was received: an event and ten steps each, two at a time.

        Each request holds three blocks, four at its longest.
        """
        count = len(self.bodies)
        each = {"events": 1, "requests": 1, "steps": 5}
        each |= {"request_steps": 10, "block_steps": 30, "peak_blocks": 4}
        counters = {f"kvpolicy_{name}": own * count for name, own in each.items()}
        text = counters_text(counters) + f"kvpolicy_floor_tokens {self.floor}\n"
        return web.Response(text=text if self.has_policies else "")


def serve(fake: ChatServer) -> AbstractContextManager[str]:
    return serve_handlers("/v1/chat/completions", fake.chat, fake.metrics)
