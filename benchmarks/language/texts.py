"""Texts to predict: cut from pinned packages of the Python index.

Brotli's tests carry four texts of the Canterbury corpus, all in the public domain: a
novel, a play, verse and the report of a workshop. SymPy's documentation and source are
under the three-clause BSD licence. Nothing of them is in this repository. Excerpts of
one book are not independent of each other, so intervals over texts are too narrow if a
policy suits one book.
"""

import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import islice
from pathlib import Path

from tokenizers import Tokenizer

from benchmarks.pinned import Package, download

BOOKS = Package(
    "brotli==1.2.1",
    "02b2f7b5a83485efe448a44ddf7983def05c3bb1dcf917d4f7154070260e13de",
    is_source=True,
)
MATHEMATICS = Package(
    "sympy==1.14.0",
    "d3d3fe8df1e5a0b42f0e7bdf50541697dbe7d23746e894990c030e2b05e72517",
    is_source=True,
)
BOOK_FOLDER = Path("tests", "testdata")
BOOK_NAMES = {
    "novel": "alice29.txt",
    "play": "asyoulik.txt",
    "verse": "plrabn12.txt",
    "report": "lcet10.txt",
}
EXCERPTS = 5
"""Of each book."""
GUIDES = (
    "explanation/best-practices.md",
    "explanation/gotchas.rst",
    "explanation/modules/physics/vector/vectors/vectors.rst",
    "guides/assumptions.rst",
    "guides/custom-functions.md",
    "modules/integrals/g-functions.rst",
    "modules/polys/domainsintro.rst",
    "modules/polys/internals.rst",
    "modules/simplify/hyperexpand.rst",
    "tutorials/intro-tutorial/simplification.rst",
    "tutorials/physics/biomechanics/biomechanical-model-example.rst",
    "tutorials/physics/continuum_mechanics/beam_problems.rst",
)
SOURCES = (
    "combinatorics/permutations.py",
    "geometry/polygon.py",
    "ntheory/factor_.py",
    "stats/crv_types.py",
)

FIRST_TOKEN = "<|endoftext|>"
"""Between documents in the training of SmolLM2."""

Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class Text:
    """A text to predict.

    Attributes:
        id: kind and place, such as `verse-2`.
    """

    id: str
    kind: str
    token_ids: tuple[int, ...]

    @property
    def digest(self) -> str:
        """First 16 hexadecimal digits of the SHA-256 of the token ids."""
        return sha256(repr(self.token_ids).encode()).hexdigest()[:16]


def encoder_of(model: Path) -> tuple[Encode, int]:
    """Return a model's encoder, and its token before each text.

    Args:
        model: folder with a `tokenizer.json`.

    Raises:
        ValueError: the tokenizer has no token FIRST_TOKEN.
    """
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    first = tokenizer.token_to_id(FIRST_TOKEN)
    if first is None:
        raise ValueError(f"model: expected a tokenizer with {FIRST_TOKEN}")

    def encode(words: str) -> list[int]:
        return tokenizer.encode(words).ids

    return encode, first


def read_texts(encode: Encode, first: int, length: int, folder: Path) -> list[Text]:
    """Return all texts, one kind after another.

    Args:
        first: token before each text, as the model was trained.
        length: tokens of each text, `first` included.
        folder: cache of the packages' members.

    Raises:
        PinnedError: a package cannot be had.
        ValueError: a text is shorter.
    """
    found = []
    for kind, number, words in _passages(folder):
        ids = (first, *encode(words)[: length - 1])
        name = f"{kind}-{number}"
        if len(ids) < length:
            raise ValueError(
                f"text-tokens: got {length}, expected at most {len(ids)}, the length "
                f"of {name}"
            )
        found.append(Text(name, kind, ids))
    return found


def spread(texts: Sequence[Text], count: int) -> list[Text]:
    """Return so many texts, as evenly over the kinds as can be."""
    by_kind: dict[str, list[Text]] = {}
    for text in texts:
        by_kind.setdefault(text.kind, []).append(text)
    rounds = [
        text
        for turn in range(max(map(len, by_kind.values())))
        for members in by_kind.values()
        for text in members[turn : turn + 1]
    ]
    return list(islice(rounds, count))


def _passages(folder: Path) -> Iterator[tuple[str, int, str]]:
    """Yield kind, number and words of each text, at least as long as it will be cut."""
    members = {kind: f"{BOOK_FOLDER}/{name}" for kind, name in BOOK_NAMES.items()}
    books = _members(BOOKS, list(members.values()), folder)
    for kind, member in members.items():
        book = "\n".join(books[member].decode("latin-1").splitlines())
        for number in range(EXCERPTS):
            place = len(book) * number // EXCERPTS
            yield kind, number + 1, book[book.index("\n", place) :].lstrip()
    guides = {f"doc/src/{name}": "guide" for name in GUIDES}
    sources = {f"sympy/{name}": "source" for name in SOURCES}
    pages = _members(MATHEMATICS, [*guides, *sources], folder)
    for kinds in (guides, sources):
        for number, (member, kind) in enumerate(kinds.items(), 1):
            yield kind, number, pages[member].decode("utf-8")


def _members(
    package: Package, members: Sequence[str], folder: Path
) -> dict[str, bytes]:
    """Return files of a source distribution by name; keeps them in the cache."""
    cached = folder / package.requirement.replace("==", "-")
    places = {member: cached / member for member in members}
    if not all(place.is_file() for place in places.values()):
        folder.mkdir(parents=True, exist_ok=True)
        with (
            tempfile.TemporaryDirectory(dir=folder) as name,
            tarfile.open(download(package, Path(name))) as archive,
        ):
            for member, place in places.items():
                stored = archive.extractfile(f"{cached.name}/{member}")
                if stored is None:
                    raise ValueError(f"{package.requirement}: no file {member}")
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(stored.read())
    return {member: place.read_bytes() for member, place in places.items()}
