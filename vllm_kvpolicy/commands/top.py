"""`vllm-kvpolicy top`: what a running server does, in a terminal.

It asks the live routes, which the server has with `--kv-live`, and `/metrics` for what
vLLM counts.
"""

import argparse
import json
import re
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from vllm_kvpolicy import compat
from vllm_kvpolicy.commands.servers import NO_KEY, NOT_THERE, Client, Refused
from vllm_kvpolicy.config_keys import shown

PATH = "/kv_policy"
EVERY_SECONDS = 1.0
MEAN_LOOKS = 5  # over which rates are means
ANSWER_SECONDS = 10.0
FAILED = 1  # exit status
# Rates of a frame, by the counter of each engine or the series of /metrics.
COUNTED = {"events": "events", "dropped": "tokens_dropped"}
SERIES = {
    "generated": "vllm:generation_tokens_total",
    "prompt": "vllm:prompt_tokens_total",
}
Counts = Mapping[str, float | None]  # by the name of a rate, None where not told


@dataclass(frozen=True)
class Sample:
    """What a server told at one time.

    Args:
        at: the time here, in seconds.
        engines: as in the answer of `/kv_policy/requests`.
    """

    at: float
    engines: list[dict[str, Any]]
    counts: Counts


def main(words: Sequence[str]) -> int:
    """Show frames until Ctrl-C, or one; 1 where the server cannot be asked, else 0."""
    given = _parser().parse_args(words)
    try:
        if find_spec("rich") is None:
            raise ValueError("this needs the package rich: pip install rich")
        _show(Watch(Client(given.url, given.api_key, ANSWER_SECONDS)), given.once)
    except ValueError as error:
        if compat.wants_traceback():
            raise
        told = " ".join(str(error).split())
        print(f"vllm-kvpolicy top: error: {told}", file=sys.stderr)
        return FAILED
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vllm-kvpolicy top",
        description="Show what a running server with --kv-live does: its pool, its "
        "requests, its events. Ctrl-C ends it.",
    )
    add = parser.add_argument
    add(
        "--url",
        type=_url,
        default="http://127.0.0.1:8000",
        help="root of the server (default: %(default)s)",
    )
    add(
        "--api-key",
        default=compat.api_key(),
        metavar="KEY",
        help="of a server that asks for one (default: VLLM_API_KEY)",
    )
    add("--once", action="store_true", help="print one frame, of a second, and end")
    return parser


def _url(text: str) -> str:
    if not text.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected http://HOST:PORT")
    return text


class Watch:
    """Looks at a server again and again.

    Attributes:
        trouble: why the last look found nothing, empty where it found something.
    """

    def __init__(self, client: Client) -> None:
        self.trouble = ""
        self._client = client
        self._facts: dict[str, Any] = {}
        self._samples: deque[Sample] = deque(maxlen=MEAN_LOOKS + 1)

    def look(self) -> None:
        """Ask the server what it does.

        Raises:
            ValueError: it cannot be asked, or has nothing to show.
        """
        try:
            # A server that comes back may have another policy.
            is_new = bool(self.trouble or not self._facts)
            facts = self._answer(PATH) if is_new else self._facts
            with self._shape():
                engines = self._answer(f"{PATH}/requests")["engines"]
                sample = Sample(time.monotonic(), engines, self._counts(engines))
        except ValueError as error:
            self.trouble = str(error)
            raise
        if is_new:
            self._samples.clear()
        self._samples.append(sample)
        self._facts, self.trouble = facts, ""

    def frame(self, most_rows: int | None) -> Any:
        """Return what was told last, see `frames.frame`.

        Raises:
            ValueError: that is not what the live routes of this version tell.
        """
        before, after = self._samples[0], self._samples[-1]
        frames = import_module("vllm_kvpolicy.commands.frames")  # loads rich
        per_second = rates(before, after)
        trouble = self.trouble and f"{self.trouble}; asking again"
        with self._shape():
            return frames.frame(
                self._facts, after.engines, per_second, most_rows, trouble
            )

    @contextmanager
    def _shape(self) -> Iterator[None]:
        """Raise ValueError for an answer that is not as this version's."""
        try:
            yield
        except (LookupError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{self._client.url}{PATH}: got an answer of another shape ({error}), "
                "expected that of a server with this version of vllm-kvpolicy"
            ) from error

    def _answer(self, path: str) -> dict[str, Any]:
        """Return the answer of a live route; ValueError with what to do about none."""
        url = self._client.url
        try:
            found = json.loads(self._client.fetch(path))
        except Refused as error:
            raise ValueError(self._why(error)) from None
        except json.JSONDecodeError as error:
            raise ValueError(f"{url}{path}: got no JSON: {error}") from None
        if not isinstance(found, dict):
            raise ValueError(f"{url}{path}: got {shown(found)}, expected an object")
        return found

    def _why(self, error: Refused) -> str:
        url = self._client.url
        if error.status == NO_KEY:
            return f"{url} wants another API key: give --api-key or set VLLM_API_KEY"
        if error.status != NOT_THERE:
            return str(error)
        series = self._metrics() or ""
        if "\nkvpolicy_" in series:
            return f"{url} has no live page: start it with --kv-live"
        if "\nvllm:" in series:
            return f"{url} has no policy: start it with --kv-policy NAME --kv-live"
        return f"{url} is no server of vLLM with --kv-live: it has no {PATH}"

    def _counts(self, engines: Sequence[Mapping[str, Any]]) -> Counts:
        found: dict[str, float | None] = {}
        for name, counter in COUNTED.items():
            found[name] = sum(each["counters"].get(counter, 0) for each in engines)
        metrics = self._metrics()
        return found | {name: _total(metrics, each) for name, each in SERIES.items()}

    def _metrics(self) -> str | None:
        try:
            return self._client.fetch("/metrics")
        except Refused:
            return None


def _total(metrics: str | None, series: str) -> float | None:
    """Return the sum of a series over its labels; None where there is none."""
    found = re.findall(rf"^{series}(?:{{.*}})? (\S+)", metrics or "", re.MULTILINE)
    return sum(map(float, found)) if found else None


def rates(before: Sample, after: Sample) -> Counts:
    """Return by how much counters grew a second; 0 where a server has started anew."""
    seconds = max(after.at - before.at, 1e-9)
    found: dict[str, float | None] = {}
    for name, count in after.counts.items():
        first = before.counts[name]
        grown = None if count is None or first is None else max(count - first, 0)
        found[name] = None if grown is None else grown / seconds
    return found


def _show(watch: Watch, is_once: bool) -> None:
    """Print frames: one of a second, or one a second until Ctrl-C.

    A terminal shows each in the place of the last. Once there was one, a server that
    does not answer is asked again.
    """
    console = import_module("rich.console").Console(highlight=False)
    watch.look()
    time.sleep(EVERY_SECONDS)
    watch.look()
    if is_once or not console.is_terminal:
        console.print(watch.frame(None))
        while not is_once:
            _look_again(watch)
            console.print("", watch.frame(None), sep="\n")
        return
    live = import_module("rich.live").Live
    with live(console=console, screen=True, auto_refresh=False) as screen:
        while True:
            head = len(console.render_lines(watch.frame(0))) + 2  # and names of columns
            frame = watch.frame(max(0, console.height - head))
            screen.update(frame, refresh=True)
            _look_again(watch)


def _look_again(watch: Watch) -> None:
    time.sleep(EVERY_SECONDS)
    with suppress(ValueError):  # which frames tell
        watch.look()
