"""Speaks just enough of vLLM's HTTP interface for the benchmark's client."""

import asyncio
import json
from contextlib import AbstractContextManager
from os.path import commonprefix

from aiohttp import web

from support.servers.running_server import counters_text, serve_handlers

MAX_TOKENS = 1000
METRICS = """\
# TYPE vllm:iteration_tokens_total histogram
vllm:iteration_tokens_total_bucket{{engine="0",le="1.0"}} {tokens}
vllm:iteration_tokens_total_count{{engine="0"}} {tokens}
vllm:iteration_tokens_total_sum{{engine="0"}} {tokens}
# TYPE vllm:request_success counter
vllm:request_success_total{{engine="0",finished_reason="stop"}} 0.0
vllm:request_success_total{{engine="0",finished_reason="length"}} {finished}
# TYPE vllm:num_preemptions counter
vllm:num_preemptions_total{{engine="0"}} 0.0
vllm:num_preemptions_created{{engine="0"}} 1.7e+09
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{{block_size="32",num_gpu_blocks="20"}} 1.0
"""


class FakeServer:
    """Counts what it answers; more than MAX_TOKENS are an HTTP 400.

    Args:
        first_token: of every output; the others follow by one.
        missing_tokens: how many fewer than asked for it sends.
        caches: whether it has a prefix cache, of prompts and in blocks of one token.
    """

    def __init__(
        self, first_token: int = 7, missing_tokens: int = 0, caches: bool = False
    ) -> None:
        self.first_token = first_token
        self.missing_tokens = missing_tokens
        self.caches = caches
        self.queried = 0
        self.hit = 0
        self.most_at_once = 0
        self._running = 0
        self.tokens = 0
        self.finished = 0
        self.bodies: list[dict] = []

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """Stream one output, one token per chunk, then the end mark."""
        body = await request.json()
        self._look_up(body["prompt"])
        self.bodies.append(body)
        if body["max_tokens"] > MAX_TOKENS:
            raise web.HTTPBadRequest(text="too many tokens")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        count = body["max_tokens"] - self.missing_tokens
        self._running += 1
        self.most_at_once = max(self.most_at_once, self._running)
        for number in range(count):
            choice = {
                "token_ids": [self.first_token + number],
                "finish_reason": "length" if number + 1 == count else None,
            }
            event = json.dumps({"choices": [choice]})
            await response.write(f"data: {event}\n\n".encode())
            await asyncio.sleep(0)
        self.tokens += count
        self.finished += 1
        self._running -= 1
        await response.write(b"data: [DONE]\n\n")
        return response

    def _look_up(self, prompt: list[int]) -> None:
        """Count a prompt's tokens, and those that it shares with an earlier prompt."""
        if self.caches:
            shared = [
                len(commonprefix([prompt, body["prompt"]])) for body in self.bodies
            ]
            self.queried += len(prompt)
            # The last token is always computed.
            self.hit += min(max(shared, default=0), len(prompt) - 1)

    async def metrics(self, request: web.Request) -> web.Response:
        text = METRICS.format(tokens=self.tokens, finished=self.finished)
        counters = {
            "vllm:prefix_cache_queries": self.queried,
            "vllm:prefix_cache_hits": self.hit,
            "kvpolicy_events": self.finished,
            "kvpolicy_blocks_returned": self.finished,
            "kvpolicy_tokens_kept": 3 * self.finished,
            "kvpolicy_tokens_dropped": self.finished,
        }
        return web.Response(text=text + counters_text(counters))


def serve(fake: FakeServer) -> AbstractContextManager[str]:
    return serve_handlers("/v1/completions", fake.complete, fake.metrics)
