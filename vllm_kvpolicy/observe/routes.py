"""The routes of the live page, on the server's own HTTP application.

All but the page itself, which holds no data, ask for one of the server's API keys where
it has any; vLLM's own check covers paths under /v1 and a few others only.
"""

import asyncio
import hashlib
import json
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from vllm_kvpolicy import compat
from vllm_kvpolicy.observe.hub import EngineReader, Hub

PATH = "/kv_policy"
STREAM = f"{PATH}/stream"
STREAM_SECONDS = 0.25  # between two looks of a stream
HEARTBEAT_SECONDS = 5.0  # after which a stream says that nothing has changed
WAIT_SECONDS = 1.5  # that an answer waits for engines to notice a first listener
# uvicorn ends once every connection is closed, and a connection closes once its client
# has taken all that was written: one that never reads would hold up the server's end.
STALL_SECONDS = 30.0  # that a client may take nothing while something waits for it
END_SECONDS = 3.0  # instead, once the server ends
LOOK_SECONDS = 0.5  # between two looks at what waits
MOST_STREAMS = 16  # open at once, of one API process
MOST_TEXT = 4096  # newest tokens of a request whose text is told
PAGE = Path(__file__).parent / "page.html"
# The page loads nothing from anywhere and talks to its own server alone.
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class LiveRoutes:
    """Answers the routes of one HTTP application.

    Args:
        facts: returns what is fixed for the life of the server, JSON-able.
        engines: returns the names of this host's engines by index, and of how many
            ranks of each the heads differ.
        keys: API keys; none where everybody may ask.
        server: returns uvicorn's server of the application; None where there is none.
        token_text: returns the text of a token, None where no text is shown.
    """

    def __init__(
        self,
        facts: Callable[[], dict[str, Any]],
        engines: Callable[[], tuple[Mapping[int, str], int]],
        pool_blocks: Callable[[], int],
        keys: list[str],
        server: Callable[[], Any],
        token_text: Callable[[int], str] | None,
    ) -> None:
        self._facts, self._engines, self._pool_blocks = facts, engines, pool_blocks
        self._digests = [_digest(key) for key in keys]
        self._server = server
        self._token_text = token_text and cache(token_text)
        self._hub: Hub | None = None
        self._num_streams = 0
        self._watches = set[asyncio.Task[None]]()

    def routes(self) -> list[Any]:
        from starlette.routing import Route

        return [
            Route(PATH, self._guarded(self.overview)),
            Route(f"{PATH}/requests", self._guarded(self.requests)),
            Route(f"{PATH}/requests/{{request_id:path}}", self._guarded(self.request)),
            Route(STREAM, self._guarded(self.stream)),
            Route(f"{PATH}/live", self.page),
        ]

    @property
    def hub(self) -> Hub:
        """What is known of the engines; they have started when somebody asks."""
        if self._hub is None:
            names, num_ranks = self._engines()
            readers = {i: EngineReader(name, num_ranks) for i, name in names.items()}
            self._hub = Hub(readers, self._pool_blocks())
        return self._hub

    def _guarded(
        self, endpoint: Callable[[Any], Awaitable[Any]]
    ) -> Callable[[Any], Awaitable[Any]]:
        """Return an endpoint that asks for a key as vLLM does: a bearer token."""

        async def guarded(request: Any) -> Any:
            scheme, _, key = request.headers.get("Authorization", "").partition(" ")
            given = _digest(key)
            # All are compared, so that the time taken tells nothing.
            matches = [secrets.compare_digest(given, each) for each in self._digests]
            if self._digests and not (scheme.lower() == "bearer" and any(matches)):
                return _json({"error": "Unauthorized"}, 401)
            return await endpoint(request)

        return guarded

    async def page(self, request: Any) -> Any:
        from starlette.responses import FileResponse

        return FileResponse(PAGE, headers=PAGE_HEADERS)

    async def overview(self, request: Any) -> Any:
        """Answer with the server's policy, and what its engines have counted."""
        engines = self.hub.readers.items()
        counters = {str(index): reader.counters() for index, reader in engines}
        return _json({**self._facts(), "counters": counters})

    async def requests(self, request: Any) -> Any:
        """Answer with the pools and requests of all engines, as of now."""
        await self._listen()
        return _json(self.hub.state())

    async def request(self, request: Any) -> Any:
        await self._listen()
        request_id = request.path_params["request_id"]
        found = self.hub.request(request_id)
        if found is None:
            error = (
                f"request: got {request_id!r}, expected one that runs or has just run"
            )
            return _json({"error": error}, 404)
        ids = found.pop("ids")
        if self._token_text is not None:
            first = max(0, len(ids) - MOST_TEXT)
            found["first_token"] = first
            texts = map(self._token_text, ids[first:])  # one by one, in the thread
            found["tokens"] = await asyncio.to_thread(list, texts)
        return _json(found)

    async def stream(self, request: Any) -> Any:
        """Answer with server-sent events for as long as the client listens."""
        from starlette.responses import StreamingResponse

        if self._num_streams >= MOST_STREAMS:
            error = f"stream: {MOST_STREAMS} are open already, close one"
            return _json({"error": error}, 503, {"Retry-After": "5"})

        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        messages = self._messages(request.scope)
        return StreamingResponse(messages, 200, headers, "text/event-stream")

    async def _messages(self, scope: Any) -> AsyncIterator[str]:
        """Yield `server` once, then `state`, `event` and `preemption` as they come."""
        self._num_streams += 1
        over = asyncio.Event()
        server = self._server()
        connection = connection_of(server, scope)
        if connection is not None:
            task = asyncio.create_task(cut_off_if_stalled(connection, server, over))
            self._watches.add(task)
            task.add_done_callback(self._watches.discard)
        try:
            async for message in self._told():
                yield message
        finally:
            self._num_streams -= 1
            over.set()

    async def _told(self) -> AsyncIterator[str]:
        yield _event("server", self._facts())
        hub, told, said = self.hub, None, 0.0
        hub.poll()
        number = max(0, hub.num_messages - 64)
        while not getattr(self._server(), "should_exit", False):
            hub.poll()
            messages = hub.since(number)
            number = hub.num_messages
            for _, name, content in messages:
                yield _event(name, content)
            state, now = hub.state(), time.monotonic()
            if state != told or now > said + HEARTBEAT_SECONDS:
                told, said = state, now
                yield _event("state", {"at": time.time(), **state})
            await asyncio.sleep(STREAM_SECONDS)

    async def _listen(self) -> None:
        """Look at the engines; wait for those that have not told since it was quiet."""
        deadline = time.monotonic() + WAIT_SECONDS
        self.hub.poll()
        while not self.hub.is_fresh() and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
            self.hub.poll()


def api_keys(args: Any) -> list[str]:
    return [key for key in args.api_key or [compat.api_key()] if key]


def _json(content: Any, status: int = 200, headers: Any = None) -> Any:
    from starlette.responses import JSONResponse

    return JSONResponse(content, status, headers)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _event(name: str, content: dict[str, Any]) -> str:
    return f"event: {name}\ndata: {json.dumps(content, separators=(',', ':'))}\n\n"


def connection_of(server: Any, scope: Any) -> Any:
    """Return uvicorn's connection of a request, None where another server runs."""
    state = getattr(server, "server_state", None)
    for connection in getattr(state, "connections", ()):
        if connection.scope is scope:
            return connection
    return None


async def cut_off_if_stalled(connection: Any, server: Any, over: asyncio.Event) -> None:
    """Close a connection whose client takes nothing for `STALL_SECONDS`.

    Where the server ends it has `END_SECONDS`.

    Args:
        over: set where the stream has ended; what still waits then is looked at, too.
    """
    transport, waiting, taken_at = connection.transport, 0, time.monotonic()
    while True:
        size, now = transport.get_write_buffer_size(), time.monotonic()
        if over.is_set() and not size:
            return
        if not size or size < waiting:
            taken_at = now
        waiting = size
        if now > taken_at + (END_SECONDS if server.should_exit else STALL_SECONDS):
            transport.abort()
            return
        await asyncio.sleep(LOOK_SECONDS)
