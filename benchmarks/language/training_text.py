"""Writes texts and conversations to train gates and adapters on, none of them measured.

    python -m benchmarks.language.training_text runs/training.jsonl

Guides are the documentation of Django, SQLAlchemy and SymPy (three-clause BSD and MIT
licences, of SymPy's the pages that `texts` leaves out); the book is the King James
Bible. Where a gate learns from such text alone, it never sees a detail that is asked
for much later, so a third of the rows are conversations: records in a guide, in other
forms than those of `task_makers`, though of some of its words, and questions about
them. All comes from pinned packages of the Python index; nothing of it is in this
repository.
"""

import argparse
import json
import random
import re
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks import pretrained
from benchmarks.language.task_makers import THINGS, words
from benchmarks.language.texts import GUIDES, MATHEMATICS
from benchmarks.pinned import Package, PinnedError, download
from vllm_kvpolicy.commands.outputs import new_file

BOOK = Package(
    "pybible==0.0.2",
    "82bacd9b2b63d0075107f399e9d8ed8833dcb24e90b4c331f36121f1153ccd68",
)
SOURCES = {
    Package(
        "django==5.2.8",
        "23254866a5bb9a2cfa6004e8b809ec6246eba4b58a7589bc2772f1bcc8456c7f",
        is_source=True,
    ): re.compile(r"[^/]+/docs/(?:topics|howto|intro|ref|faq|internals)/.*\.txt"),
    Package(
        "sqlalchemy==2.0.44",
        "0ae7454e1ab1d780aee69fd2aae7d6b8670a581d8847f2d1e0f7ddfbf47e5a22",
        is_source=True,
    ): re.compile(r"[^/]+/doc/build/(?:orm|core|tutorial|faq)/.*\.rst"),
    MATHEMATICS: re.compile(r"[^/]+/doc/src/.*\.(?:rst|md)"),
}
SIZES = (2000,) * 4 + (4000,) * 3 + (8000,) * 2
"""Characters of rows, of which as many have few tokens as have many: 500 to 2,500."""
FIRST = words(
    "Anna Boris Clara David Elena Felix Greta Henry Irene Jonas Karla Louis Maria Nils "
    "Olga Peter Rosa Simon Teresa Victor"
)
LAST = words(
    "Keller Novak Brandt Costa Duval Evans Fischer Garcia Hansen Ivanov Jensen Larsen "
    "Meyer Nilsson Olsen Palmer Rossi Silva Turner Weber"
)
RECORDS, ASKED = 12, 5
"""Lines that a conversation hides, and that it asks for."""


def is_trained_on(name: str, wanted: re.Pattern[str]) -> bool:
    """Return whether a package's file is wanted, and none that `texts` measures."""
    is_measured = name.partition("/doc/src/")[2] in GUIDES
    return wanted.fullmatch(name) is not None and not is_measured


def _packed(folder: Path) -> Iterator[str]:
    """Yield the guides, and the book as one text."""
    for package, wanted in SOURCES.items():
        with (
            tempfile.TemporaryDirectory(dir=folder) as name,
            tarfile.open(download(package, Path(name))) as archive,
        ):
            for member in archive:
                stored = archive.extractfile(member)
                if stored and is_trained_on(member.name, wanted):
                    yield stored.read().decode("utf-8")
    with (
        tempfile.TemporaryDirectory(dir=folder) as name,
        zipfile.ZipFile(download(BOOK, Path(name))) as wheel,
    ):
        bible = wheel.read("pybible/Bible.py").decode("utf-8")
    yield "\n".join(re.findall(r'"\d+:\d+:\d+ (.*)"', bible))


def _code(rng: random.Random) -> str:
    letters = "".join(rng.choices("ABCDEFGHKLMNPRSTUVWXYZ", k=2))
    return f"{letters}-{rng.randrange(100, 1000)}"


def _person(rng: random.Random) -> str:
    return f"{rng.choice(FIRST)} {rng.choice(LAST)}"


def _price(rng: random.Random) -> tuple[str, str, str]:
    thing, price = rng.choice(THINGS), f"{rng.randrange(2, 900)} euros"
    return f"A {thing} costs {price}.", f"What does a {thing} cost?", price


def _ticket(rng: random.Random) -> tuple[str, str, str]:
    code, person = _code(rng), _person(rng)
    said = f"Ticket {code} is assigned to {person}."
    return said, f"Who works on ticket {code}?", person


def _phone(rng: random.Random) -> tuple[str, str, str]:
    person, number = _person(rng), f"555-{rng.randrange(1000, 10000)}"
    return f"{person}, phone {number}", f"Which phone number has {person}?", number


def _room(rng: random.Random) -> tuple[str, str, str]:
    person, room = _person(rng), f"room {rng.randrange(100, 999)}"
    return f"{person} sits in {room}.", f"Where does {person} sit?", room


def _setting(rng: random.Random) -> tuple[str, str, str]:
    name = f"{rng.choice(THINGS)}_{rng.choice(THINGS)}".upper()
    value = str(rng.randrange(10, 10000))
    return f"{name} = {value}", f"What is {name} set to?", value


KINDS: tuple[Callable[[random.Random], tuple[str, str, str]], ...] = (
    _price,
    _ticket,
    _phone,
    _room,
    _setting,
)


def _conversation(passage: str, rng: random.Random) -> list[dict[str, str]]:
    """Hide records in a passage and ask for some, one question a turn."""
    made = {
        record[1]: record for record in (rng.choice(KINDS)(rng) for _ in range(RECORDS))
    }
    records = list(made.values())
    lines = passage.split("\n")
    for said, _, _ in records:
        lines.insert(rng.randrange(len(lines)), said)
    turns = []
    for _, question, answer in rng.sample(records, min(ASKED, len(records))):
        turns += [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
    turns[0]["content"] = "\n".join(lines) + f"\n\n{turns[0]['content']}"
    return turns


def rows(texts: list[str], count: int, seed: int) -> Iterator[dict[str, object]]:
    """Yield rows as `python -m training` reads them; the first ones stay the same."""
    rng = random.Random(seed)
    book, guides = texts[-1], [text for text in texts[:-1] if len(text) > max(SIZES)]
    for number in range(count):
        source, size = rng.choice([book, *rng.sample(guides, 3)]), rng.choice(SIZES)
        start = source.index("\n", max(rng.randrange(len(source) - size + 1) - 1, 0))
        passage = source[start : start + size].strip()
        if number % 3 == 0:
            yield {"messages": _conversation(passage, rng)}
        else:
            yield {"text": passage}


def main(argv: list[str] | None = None) -> None:
    """Write the rows to a file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=new_file)
    parser.add_argument("--rows", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    folder = pretrained.default_folder().parent
    folder.mkdir(parents=True, exist_ok=True)
    try:
        texts = list(_packed(folder))
    except PinnedError as error:
        raise SystemExit(f"training_text: {error}") from None
    with args.out.open("w") as file:
        for row in rows(texts, args.rows, args.seed):
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
