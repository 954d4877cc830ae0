"""Whatever has happened to the files of a trace, its commands end in a sentence."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.made_traces import make_event, rows, run_request, write_trace
from vllm_kvpolicy.__main__ import main
from vllm_kvpolicy.observe.trace_files import to_arrays

WAYS = 300  # to damage a file, by seed
DRAWN = 20  # every such one is drawn as well, which takes longer
NAME = "000001.npz"
NOTES = {
    "mass": np.ones((1, 2, 10), np.float32),
    "segments": np.array([[[[0, 10]], [[0, 10]]]], np.int32),
    "lse_drop": np.ones((1, 2), np.float32),
}
CHOSEN = (0, 6, 7, 8, 9)
TWO_HEADS = {"held": rows(range(10), range(10)), "selected": rows(CHOSEN, CHOSEN)}
TWO_HEADS["survivors"] = rows((0, 3), (0, 3))
Run = Callable[..., tuple[int, str]]


def make(folder: Path) -> Path:
    """Write a trace of three events and return its second file."""
    events = [make_event(ordinal=n, notes=NOTES, **TWO_HEADS) for n in range(3)]
    return write_trace(folder, events) / NAME


def flipped(content: bytes, draw: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(draw.choice((1, 3, 50))):
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def cut(content: bytes, draw: random.Random) -> bytes:
    return content[: draw.randrange(len(content))]


def torn(content: bytes, draw: random.Random) -> bytes:
    start = draw.randrange(len(content))
    return content[:start] + content[start + draw.randrange(1, 400) :]


def filled(content: bytes, draw: random.Random) -> bytes:
    start = draw.randrange(len(content))
    size = draw.randrange(1, 400)
    return content[:start] + draw.randbytes(size) + content[start + size :]


DAMAGES = (flipped, cut, torn, filled)


@pytest.fixture
def run(capsys: pytest.CaptureFixture) -> Run:
    def run(*words: object) -> tuple[int, str]:
        """Run a command of `trace`; return its status and what it wrote to stderr."""
        try:
            status = main(["trace", *map(str, words)])
        except SystemExit as stopped:
            status = int(stopped.code or 0)
        return status, capsys.readouterr().err

    return run


def test_bytes_that_changed_end_in_a_sentence(tmp_path, run):
    path = make(tmp_path)
    whole = path.read_bytes()
    refused = 0
    for seed in range(WAYS):
        draw = random.Random(seed)
        path.write_bytes(draw.choice(DAMAGES)(whole, draw))
        command = "report" if seed % DRAWN else "plot"
        status, said = run(command, tmp_path)
        if status:
            refused += 1
            assert said.splitlines()[-1].count(repr(str(path))) == 1, (seed, said)
        assert status in (0, 2) and "Traceback" not in said, seed
        assert "(from " not in said, (seed, said)  # an error that nobody worded
    # The rest hit bytes that no reader looks at, such as the times of files.
    assert refused > 0.8 * WAYS


def of_fields(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        arrays: dict[str, Any] = to_arrays(make_event(notes=NOTES, **TWO_HEADS))
        change(arrays)
        np.savez(path, **arrays)

    return damage


def replaced(name: str, value: Any) -> Callable[[Path], None]:
    return of_fields(lambda arrays: arrays.update({name: np.asarray(value)}))


OTHER_FILES: dict[str, Callable[[Path], Any]] = {
    "empty": lambda path: path.write_bytes(b""),
    "a pickle": lambda path: np.save(path.open("wb"), np.array([{}])),
    "another version": of_fields(lambda arrays: arrays.pop("sinks")),
    "text for a number": replaced("position", "ten"),
    "a fraction": replaced("position", 10.5),
    "a number for text": replaced("policy", 3),
    "a path for a name": replaced("policy", "../../etc"),
    "text for tokens": replaced("held", [[["a"]]]),
    "tokens of no head": replaced("held", np.zeros((1, 0, 10), np.int32)),
    "a note of other heads": replaced("note_lse_drop", np.zeros((2, 1))),
    "an event of other heads": lambda path: np.savez(path, **to_arrays(make_event())),
    "a request of two policies": replaced("policy", "tova"),
}


@pytest.mark.parametrize("name", OTHER_FILES)
def test_a_file_that_is_no_event_of_the_trace_is_named(tmp_path, name, run):
    path = make(tmp_path)
    OTHER_FILES[name](path)
    for command in ("report", "plot"):
        status, said = run(command, tmp_path)
        line = said.splitlines()[-1]
        assert status == 2 and ": error: trace: " in line, said
        assert repr(str(path)) in line and "Traceback" not in said
    assert not (tmp_path / "plots").exists()


def ranks(folder: Path, *events: Any) -> Iterator[Path]:
    for rank, event in enumerate(events):
        yield write_trace(folder / f"rank-{rank}-of-{len(events)}", [event])


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({}, "different notes"),
        ({"notes": NOTES, **TWO_HEADS}, ""),
        ({"notes": {"mass": NOTES["mass"]}, **TWO_HEADS}, "different notes"),
    ],
)
def test_ranks_that_do_not_go_together_are_refused(tmp_path, other, reason, run):
    own = make_event(notes=NOTES, **TWO_HEADS)
    list(ranks(tmp_path / "run", own, make_event(**other)))
    status, said = run("report", tmp_path)
    assert status == 2 * bool(reason)
    assert reason in said and "Traceback" not in said


def test_ranks_without_a_common_event_are_refused(tmp_path, run):
    _, second = ranks(tmp_path / "run", make_event(), make_event())
    (second / "000000.npz").rename(second / "000007.npz")
    for command in ("report", "plot"):
        status, said = run(command, tmp_path / "run")
        assert status == 2 and "no event that all ranks recorded" in said


def test_a_request_may_be_named_like_a_formula(tmp_path, run):
    events = run_request(lambda held: held[::2], events=2)
    named = [make_event(**{**vars(each), "request_id": r"$\frac"}) for each in events]
    assert run("plot", write_trace(tmp_path, named)) == (0, "")
