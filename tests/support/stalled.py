"""A client that opens a stream and never reads."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def open_stalled_stream(port: int, key: str) -> Iterator[socket.socket]:
    """Yield a socket with an open stream that nobody reads.

    The system takes little for it: buffers as small as they get, which follow from the
    sizes of segments.
    """
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)
        client.connect(("127.0.0.1", port))
        request = "GET /kv_policy/stream HTTP/1.1\r\nHost: localhost\r\n"
        request += f"Authorization: Bearer {key}\r\n\r\n"
        client.sendall(request.encode())
        yield client
