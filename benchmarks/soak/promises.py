"""What a server promises, and the one place that checks it."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Promise:
    """One promise.

    Attributes:
        name: in records and messages.
        sentence: what holds, as docs/reliability.md has it.
    """

    name: str
    sentence: str


ANSWERS = Promise(
    "answers", "A valid request that its client reads to the end is answered in full."
)
STRUCTURE = Promise(
    "structure", "A finished structured answer has the structure that was asked for."
)
REFUSALS = Promise(
    "refusals", "A bad kv_ key is an HTTP 400 of one line that names the key."
)
FUZZ = Promise(
    "fuzz", "No request, however malformed, is an HTTP 5xx unless it is with stock."
)
PROBES = Promise(
    "probes", "A fixed question has the same answer after every wave as at the start."
)
POOL = Promise(
    "pool", "When the last client has gone, no request is left and no block is held."
)
ENGINE = Promise("engine", "The processes of the server are those that started.")
LOG = Promise(
    "log", "The log has no traceback from this package but those of refused requests."
)
DESCRIPTORS = Promise(
    "descriptors", "Open descriptors and threads in quiet moments do not grow."
)
MEMORY = Promise(
    "memory", "Resident memory grows per request no faster than stock's, within noise."
)
LATENCY = Promise(
    "latency", "Answers in quiet moments do not get slower relative to stock's."
)
KILLED = Promise(
    "killed", "A server whose engine is killed ends, and leaves no file of counters."
)
TERMINATED = Promise(
    "terminated",
    "SIGTERM under load ends the engine in time, and the server once its clients left.",
)
DISK = Promise(
    "disk", "Serving goes on when the disk of a trace is full or its folder is gone."
)
OBSERVERS = Promise(
    "observers",
    "Serving goes on when what only observes fails; the log and /metrics tell it once.",
)
CUT_FILE = Promise("cut file", "Serving goes on when the file of counters is cut off.")
OF_SOAK = (
    *(ANSWERS, STRUCTURE, REFUSALS, FUZZ, PROBES, POOL, ENGINE, LOG, DESCRIPTORS),
    *(MEMORY, LATENCY),
)
OF_FAULTS = (KILLED, TERMINATED, DISK, CUT_FILE, OBSERVERS)


class BrokenPromise(Exception):
    """The first promise that did not hold."""

    def __init__(self, promise: Promise, what: str) -> None:
        super().__init__(f"{promise.name}: {promise.sentence} But {what}")
        self.promise, self.what = promise, what


@dataclass
class Ledger:
    """Counts the checks of each promise.

    Attributes:
        checks: by the promise's name.
    """

    checks: Counter[str] = field(default_factory=Counter)

    def check(self, promise: Promise, holds: bool, what: str) -> None:
        """Count a check.

        Raises:
            BrokenPromise: it was not kept.
        """
        self.checks[promise.name] += 1
        if not holds:
            raise BrokenPromise(promise, " ".join(what.split()))
