"""What a run of vLLM's tests has to say of each test, one line of JSON per test."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"


@dataclass
class Record:
    """One test in one mode.

    Args:
        test: file, class, function and parameters, as pytest names them.
        outcome: PASSED, FAILED (teardown included) or SKIPPED.
        ours: objects of our classes that it built.
        refused: rows of `api.guards` that refuse what it configured.
        events: that its schedulers carried out.
    """

    test: str
    outcome: str = SKIPPED
    message: str = ""
    ours: int = 0
    refused: list[str] = field(default_factory=list)
    events: int = 0

    def write(self, log: Path) -> None:
        """Add the record to a log."""
        with log.open("a") as out:
            out.write(json.dumps(asdict(self)) + "\n")


def read(log: Path) -> dict[str, Record]:
    """Return the records of a log by test."""
    records = (Record(**json.loads(line)) for line in log.read_text().splitlines())
    return {record.test: record for record in records}
