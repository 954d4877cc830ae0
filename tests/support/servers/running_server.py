"""Runs the handlers of a fake server in a thread."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager

from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def counters_text(counters: Mapping[str, float]) -> str:
    """Return counters of one engine as Prometheus text."""
    return "".join(
        f'# TYPE {name} counter\n{name}_total{{engine="0"}} {value}\n'
        for name, value in counters.items()
    )


@contextmanager
def serve_handlers(
    path: str,
    answer: Handler,
    metrics: Handler,
    more: Mapping[str, Handler] | None = None,
) -> Iterator[str]:
    """Yield the root URL of a server with POST `path` and GET /metrics."""
    loop = asyncio.new_event_loop()
    application = web.Application()
    application.router.add_post(path, answer)
    for place, handler in {"/metrics": metrics, **(more or {})}.items():
        application.router.add_get(place, handler)
    # Handlers that stall on purpose are not waited for.
    runner = web.AppRunner(application, shutdown_timeout=0.1)

    async def start() -> str:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield asyncio.run_coroutine_threadsafe(start(), loop).result(10)
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
