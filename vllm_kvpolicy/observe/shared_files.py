"""What the processes of a server share: small files, named after engines.

The process that makes a file locks it for as long as it lives. The process that starts
a server removes the server's files as it ends, locked or not. Where it is killed, they
stay until the next engine starts in that folder: it removes files without a lock.

A `Ring` has records that one process writes and others read, while somebody listens. A
reader that falls behind misses the oldest. It may read a record that is being
overwritten; check sums tell.
"""

import fcntl
import json
import logging
import os
import struct
import tempfile
import time
from contextlib import suppress
from functools import cache
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any
from weakref import finalize
from zlib import crc32

logger = logging.getLogger("vllm.kv_policy")  # without importing vLLM

# Names of files, by what is in them; the name of their engine goes into the braces.
COUNTERS = "vllm-kvpolicy-{}.counters"
RECORDS = "vllm-kvpolicy-{}.live"


def file_path(kind: str, engine: str) -> Path:
    """Return where a file is.

    Args:
        kind: COUNTERS or RECORDS.
        engine: see `own_engine`; and what tells several files of one engine apart.
    """
    return Path(tempfile.gettempdir()) / kind.format(engine)


def own_engine(vllm_config: Any) -> str:
    """Return the name of the engine that a scheduler or a worker belongs to.

    The server's name and the engine's index among data-parallel ones, which vLLM sets
    in the process of each engine.
    """
    return _engine_name(vllm_config, vllm_config.parallel_config.data_parallel_index)


def engines_here(vllm_config: Any) -> dict[int, str]:
    """Return the names, by index, of the engines of an API process on this host."""
    parallel = vllm_config.parallel_config
    first = parallel.data_parallel_index
    indices = range(first, first + parallel.data_parallel_size_local)
    return {index: _engine_name(vllm_config, index) for index in indices}


def _engine_name(vllm_config: Any, index: int) -> str:
    return f"{vllm_config.instance_id}-{index}"


@cache
def remove_stale_files_at_exit() -> None:
    """Let this process remove files as it ends, of engines too that vLLM kills then.

    vLLM leaves an engine no time to remove its file unless --shutdown-timeout does. A
    negative priority is after multiprocessing has waited for the process's children.
    """
    Finalize(None, remove_stale_files, exitpriority=-1)


@cache
def remove_files_at_exit(server: str) -> None:
    """Let the process that starts a server remove all its files as it ends.

    By then vLLM has stopped or killed the engines and their workers, but has waited for
    the engines alone: a killed worker may not have let go of its lock yet. What it
    still writes goes to a file without a name. `server` is the engines' instance id.
    """
    Finalize(None, _remove_files, args=(server,), exitpriority=-1)


def _remove_files(server: str) -> None:
    for kind in (COUNTERS, RECORDS):
        for path in Path(tempfile.gettempdir()).glob(kind.format(f"{server}-*")):
            with suppress(OSError):  # gone meanwhile
                path.unlink()


def remove_stale_files() -> None:
    """Remove this user's files whose engine is gone without its shutdown."""
    for kind in (COUNTERS, RECORDS):
        for path in Path(tempfile.gettempdir()).glob(kind.format("*")):
            # Gone meanwhile, of another user, or locked by its engine.
            with suppress(OSError):
                _remove_unlocked(path)


def _remove_unlocked(path: Path) -> None:
    """Remove a file of this user; OSError where a process has it locked."""
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    try:
        if os.fstat(descriptor).st_uid == os.getuid():
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # No link: removed meanwhile, and the name is a new engine's.
            if os.fstat(descriptor).st_nlink:
                path.unlink()
    finally:
        os.close(descriptor)


class SharedFile:
    """A file of a fixed size that several processes read and write.

    It is read and written by system calls. A memory map would end the process by SIGBUS
    where somebody cuts the file short or the disk is full; here a write that fails is
    told once, and what is missing reads as zeros.

    Args:
        create: make a zeroed file and lock it, once files that engines left behind
            are removed; otherwise it must exist.

    Raises:
        FileNotFoundError: `create` is False and no engine has made the file.
        ValueError: an engine has made it and not given it its size yet.
    """

    def __init__(self, path: Path, size: int, create: bool) -> None:
        self.path = path
        if create:
            remove_stale_files()
        # Open, and with that locked, until this object is gone.
        self._descriptor = _make(path, size) if create else os.open(path, os.O_RDWR)
        finalize(self, os.close, self._descriptor)
        if os.fstat(self._descriptor).st_size < size:
            raise ValueError(f"{path}: got fewer than {size} bytes")
        self._has_failed = False

    def read_bytes(self, start: int, size: int) -> bytes:
        """Return bytes of the file, zeros where they cannot be read."""
        found = b""
        with suppress(OSError):
            found = os.pread(self._descriptor, size, start)
        return found.ljust(size, b"\0")

    def write_bytes(self, start: int, data: bytes) -> bool:
        """Write bytes; return whether that succeeded, and warn once if it does not."""
        try:
            return os.pwrite(self._descriptor, data, start) == len(data)
        except OSError as error:
            if not self._has_failed:
                logger.warning(
                    "cannot write to %s (%s); serving goes on without what it tells",
                    self.path,
                    error.strerror,
                )
            self._has_failed = True
            return False

    def remove(self) -> None:
        """Delete the file; who has it open keeps reading what is in it."""
        self.path.unlink(missing_ok=True)


def _make(path: Path, size: int) -> int:
    """Return a descriptor of the file with a shared lock on it, made if missing."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        # Where files cannot be locked nobody can remove this one either.
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        # Another engine may have removed the file before the lock was on it.
        if os.fstat(descriptor).st_nlink:
            break
        os.close(descriptor)
    if os.fstat(descriptor).st_size < size:
        os.truncate(descriptor, size)
    return descriptor


# Names of rings, of the name of their engine: its scheduler's and its ranks'.
SCHEDULER, RANK = "{}-scheduler", "{}-rank{}"
LISTEN_SECONDS = 3.0  # that a listener is believed to be there after its last word
NUM_ROWS = 512  # records that the table knows
DATA_BYTES = 2**23  # of which only what is written takes memory
_LEASE = struct.Struct("d")  # time.monotonic() until which somebody listens
_HEAD = struct.Struct("QQ")  # records written so far, and their bytes with gaps
_ROW = struct.Struct("QQQQ")  # of the table: number, first byte, length, check sum
_HEAD_AT, _TABLE_AT = 8, 64
_DATA_AT = _TABLE_AT + NUM_ROWS * _ROW.size
SIZE_BYTES = _DATA_AT + DATA_BYTES


class Ring(SharedFile):
    """The newest records of one writer; for `create` and errors see `SharedFile`.

    Args:
        name: the engine's, see `own_engine`, and who of it writes.
    """

    def __init__(self, name: str, create: bool) -> None:
        super().__init__(file_path(RECORDS, name), SIZE_BYTES, create)

    def listen(self) -> None:
        """Tell the writer that somebody listens, for `LISTEN_SECONDS` from now."""
        self.write_bytes(0, _LEASE.pack(time.monotonic() + LISTEN_SECONDS))

    def is_heard(self) -> bool:
        """Return whether somebody listens; all that a step costs where nobody does."""
        return self._unpack(_LEASE, 0)[0] > time.monotonic()

    def append(self, record: dict[str, Any]) -> bool:
        """Write a JSON-able record, which may overwrite the oldest ones.

        Returns:
            False where it has not been written: it is larger than the file, or the
            disk is full.
        """
        data = json.dumps(record, separators=(",", ":")).encode()
        if len(data) > DATA_BYTES:
            return False
        number, start = self._unpack(_HEAD, _HEAD_AT)
        if start % DATA_BYTES + len(data) > DATA_BYTES:
            start += -start % DATA_BYTES  # never around the end
        row = _TABLE_AT + number % NUM_ROWS * _ROW.size
        told = _ROW.pack(number, start, len(data), crc32(data))
        return (
            self.write_bytes(_DATA_AT + start % DATA_BYTES, data)
            and self.write_bytes(row, told)
            and self.write_bytes(_HEAD_AT, _HEAD.pack(number + 1, start + len(data)))
        )

    def read(self, first: int = 0) -> tuple[list[dict[str, Any]], int]:
        """Return the records that are left from `first` on, and where to go on."""
        head = self._unpack(_HEAD, _HEAD_AT)[0]
        if first > head:
            first = 0  # of another file that had this name
        numbers = range(max(first, head - NUM_ROWS), head)
        found = [self._record(number) for number in numbers]
        return [record for record in found if record is not None], head

    def _record(self, number: int) -> dict[str, Any] | None:
        row = _TABLE_AT + number % NUM_ROWS * _ROW.size
        found, start, length, check = self._unpack(_ROW, row)
        data = self.read_bytes(_DATA_AT + start % DATA_BYTES, length)
        if not length or found != number or crc32(data) != check:
            return None
        return json.loads(data)

    def _unpack(self, form: struct.Struct, start: int) -> tuple[Any, ...]:
        return form.unpack(self.read_bytes(start, form.size))
