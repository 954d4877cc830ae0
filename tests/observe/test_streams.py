"""Streams over real connections: their number, and clients that do not read."""

import time
from contextlib import contextmanager, suppress

import httpx
import pytest

from support.live import KEY, PlayedEngine, serving_routes
from support.stalled import open_stalled_stream
from support.waiting import wait_until
from vllm_kvpolicy.observe import routes

pytestmark = pytest.mark.timeout(60)
HEADERS = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture
def flood(monkeypatch):
    """Streams tell all that they can, so that a client that stalls shows at once."""
    monkeypatch.setattr(routes, "STREAM_SECONDS", 0.001)
    monkeypatch.setattr(routes, "HEARTBEAT_SECONDS", 0.0)
    monkeypatch.setattr(routes, "LOOK_SECONDS", 0.05)


def waiting(server):
    connections = [*server.server_state.connections]
    return [each.transport.get_write_buffer_size() for each in connections]


def test_a_client_that_does_not_read_is_cut_off(port, flood, monkeypatch):
    monkeypatch.setattr(routes, "STALL_SECONDS", 1.0)
    with PlayedEngine(200), serving_routes(port) as server:
        with open_stalled_stream(port, KEY) as client:
            wait_until(lambda: any(waiting(server)))
            most = 0
            while found := waiting(server):
                most = max(most, *found)
                time.sleep(0.02)
            # asyncio's own limit, and the message that goes beyond it.
            assert 0 < most < 2**16 + 2**17
            assert is_closed(client)
        # It has given back its place among the streams.
        monkeypatch.setattr(routes, "MOST_STREAMS", 1)
        with listening(port) as answer:
            assert answer.status_code == 200


def is_closed(client):
    """Return whether nothing follows what has arrived."""
    client.settimeout(5)
    with suppress(ConnectionResetError):
        while client.recv(2**16):
            pass
    return True


def test_a_client_that_reads_slowly_is_not_cut_off(port, flood, monkeypatch):
    monkeypatch.setattr(routes, "STALL_SECONDS", 1.0)
    with (
        PlayedEngine(200),
        serving_routes(port) as server,
        open_stalled_stream(port, KEY) as client,
    ):
        wait_until(lambda: any(waiting(server)))
        behind = time.monotonic()
        # Until it is behind for longer than it might take nothing: a busy machine
        # tells so little at times that even this client is not behind.
        while time.monotonic() < behind + 2.5:
            assert client.recv(2**12)
            if not any(waiting(server)):
                behind = time.monotonic()
            time.sleep(0.005)


@pytest.mark.parametrize(
    ("period", "least"),
    [(0.001, 2**16), (0.1, 2**14)],
    ids=["while-it-waits", "at-its-end"],
)
def test_a_client_that_does_not_read_does_not_hold_up_the_end(
    port, flood, monkeypatch, period, least
):
    """It may stall within a message, and once the stream has ended, too."""
    monkeypatch.setattr(routes, "END_SECONDS", 1.0)
    monkeypatch.setattr(routes, "STREAM_SECONDS", period)
    with (
        PlayedEngine(20),
        serving_routes(port) as server,
        open_stalled_stream(port, KEY),
    ):
        wait_until(lambda: sum(waiting(server)) >= least)
        begun = time.monotonic()
        server.should_exit = True
        wait_until(lambda: not server.server_state.connections)
        assert time.monotonic() - begun < 20  # 30 where it waits for the client


@contextmanager
def listening(port):
    url = f"http://127.0.0.1:{port}/kv_policy/stream"
    with httpx.stream("GET", url, headers=HEADERS, timeout=5) as answer:
        yield answer


def test_streams_above_a_number_are_refused(port, monkeypatch):
    monkeypatch.setattr(routes, "MOST_STREAMS", 2)
    with PlayedEngine(1), serving_routes(port):
        with listening(port) as one, listening(port) as two:
            assert (one.status_code, two.status_code) == (200, 200)
            lines = [one.iter_lines(), two.iter_lines()]
            assert [next(each) for each in lines] == ["event: server"] * 2
            with listening(port) as third:
                assert third.status_code == 503 and third.headers["Retry-After"]
                assert "2 are open already" in third.read().decode()

        def is_free():
            with listening(port) as again:
                return again.status_code == 200

        wait_until(is_free)
