"""Records that one process writes and others read, while somebody listens.

A file of a fixed size: the time until which somebody listens, a table of the newest
records, and their bytes, in a circle. A reader that falls behind misses the oldest. It
may read a record that is being overwritten; check sums tell.
"""

import json
import struct
import time
from typing import Any
from zlib import crc32

from vllm_kvpolicy.observe.shared_files import RECORDS, SharedFile, file_path

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


class Ring:
    """The newest records of one writer.

    Args:
        name: the engine's, see `files.own_engine`, and who of it writes.
        create: make the file and lock it, as its writer does; otherwise it must exist.

    Raises:
        FileNotFoundError: `create` is False and no engine has made the file.
        ValueError: it has no size yet.
    """

    def __init__(self, name: str, create: bool) -> None:
        self.file = SharedFile(file_path(RECORDS, name), SIZE_BYTES, create)
        self.path = self.file.path

    def listen(self) -> None:
        """Tell the writer that somebody listens, for `LISTEN_SECONDS` from now."""
        self.file.write(0, _LEASE.pack(time.monotonic() + LISTEN_SECONDS))

    def is_heard(self) -> bool:
        """Return whether somebody listens; all that a step costs where nobody does."""
        return self._unpack(_LEASE, 0)[0] > time.monotonic()

    def append(self, record: dict[str, Any]) -> bool:
        """Write a record, which may overwrite the oldest ones.

        Args:
            record: JSON-able.

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
            self.file.write(_DATA_AT + start % DATA_BYTES, data)
            and self.file.write(row, told)
            and self.file.write(_HEAD_AT, _HEAD.pack(number + 1, start + len(data)))
        )

    def read(self, first: int = 0) -> tuple[list[dict[str, Any]], int]:
        """Return the records from a number on that are still there, oldest first.

        Args:
            first: number of the first one wanted.

        Returns:
            The records, and the number from which to go on.
        """
        head = self._unpack(_HEAD, _HEAD_AT)[0]
        if first > head:
            first = 0  # of another file that had this name
        numbers = range(max(first, head - NUM_ROWS), head)
        found = [self._record(number) for number in numbers]
        return [record for record in found if record is not None], head

    def _record(self, number: int) -> dict[str, Any] | None:
        """Return a record, None where it has been overwritten."""
        row = _TABLE_AT + number % NUM_ROWS * _ROW.size
        found, start, length, check = self._unpack(_ROW, row)
        data = self.file.read(_DATA_AT + start % DATA_BYTES, length)
        if not length or found != number or crc32(data) != check:
            return None
        return json.loads(data)

    def _unpack(self, form: struct.Struct, start: int) -> tuple[Any, ...]:
        return form.unpack(self.file.read(start, form.size))

    def remove(self) -> None:
        """Delete the file; who has it open keeps reading the old records."""
        self.file.remove()
