"""Cuts off clients of a stream that take nothing of it.

uvicorn ends once every connection is closed, and a connection closes once its client
has taken all that was written: one that never reads would hold up the server's end.
"""

import asyncio
import time
from typing import Any

STALL_SECONDS = 30.0  # that a client may take nothing while something waits for it
END_SECONDS = 3.0  # instead, once the server ends
LOOK_SECONDS = 0.5  # between two looks at what waits


def connection_of(server: Any, scope: Any) -> Any:
    """Return uvicorn's connection of a request, None where another server runs.

    Args:
        server: uvicorn's, or None.
        scope: the request's.
    """
    state = getattr(server, "server_state", None)
    for connection in getattr(state, "connections", ()):
        if connection.scope is scope:
            return connection
    return None


async def cut_off_if_stalled(connection: Any, server: Any, over: asyncio.Event) -> None:
    """Close a connection whose client takes nothing for `STALL_SECONDS`.

    Where the server ends it has `END_SECONDS`.

    Args:
        connection: uvicorn's.
        server: uvicorn's.
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
