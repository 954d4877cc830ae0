"""Writes a page of the site for each word of a policy's name.

What a page says stands elsewhere already: formula, source and deviations in the
docstring of the word's module, options in its class, figures in
`benchmarks/results`. Called by site_pages.py.
"""

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from benchmarks.report import tables
from benchmarks.report.records import read
from benchmarks.stats import estimate_difference
from vllm_kvpolicy.policies.names import (
    ADMISSIONS,
    ALLOCATORS,
    SCORERS,
    SELECTIONS,
    parse,
)
from vllm_kvpolicy.policies.words import Word

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
FOLDER = "policies/"
"""Of the site."""
KINDS: Mapping[str, tuple[str, Mapping[str, type[Word]]]] = {
    "Scorer": ("says how important each token is", SCORERS),
    "Allocator": ("says how the budget is shared among heads and layers", ALLOCATORS),
    "Admission": ("decides which tokens stay at all", ADMISSIONS),
    "Selection": ("chooses what a step reads", SELECTIONS),
}
BETTER = "shown to be better"
EQUAL = "uniform"
"""Page of the allocator without a word."""
REFERENCES = ("full", "random", "streaming")
PAGES = {"dms": "dms", "hard": "hard_kv", "kvzap": "kvzap", "quest": "quest"}
PAGES |= {"wgkv": "wgkv"}
"""Words with a page of their own in docs/."""
ARXIV = re.compile(r"arXiv (\d{4}\.\d{5})")
WEB = re.compile(r"https://[^\s;)]*[^\s;).,]")


@dataclass(frozen=True)
class Measure:
    """A table of a result file.

    Args:
        title: what was measured, and on what.
        kind: of `benchmarks.report.tables`.
        file: of benchmarks/results.
        wanted: what else the table's description says.
        figure: of the file's rows that is compared with `random`; None for none.
        sign: 1 where more is better.
        about: its subject in a few words.
        unit: of a difference; "points" are hundredths.
    """

    title: str
    kind: str
    file: str
    wanted: Mapping[str, Any]
    figure: str | None = None
    sign: int = 1
    about: str = ""
    unit: str = ""

    @property
    def rows(self) -> list[Mapping[str, Any]]:
        """The file's rows, each of a policy."""
        record = _record(self.file)
        return record["rows"] if self.figure else record["summary"]

    @property
    def values(self) -> dict[str, list[float]]:
        """The compared figure of each policy, by item."""
        return {row["policy"]: row[str(self.figure)] for row in self.rows}

    def show(self, value: float) -> str:
        """Return a difference as text."""
        return f"{100 * value:+.0f}" if self.unit == "points" else f"{value:+.3f}"

    def verdict(self, low: float, high: float) -> str:
        """Return what an interval of differences shows."""
        ends = self.sign * low, self.sign * high
        return BETTER if min(ends) > 0 else "worse" if max(ends) < 0 else "not shown"

    def table(self, names: Sequence[str]) -> str:
        """Return the table of some names, in Markdown."""
        if self.kind == "columns":
            shown: Any = {f"`{name}`": name for name in names}
            wanted = {"file": self.file, "rows": shown, **self.wanted}
        else:
            rows = [name for name in names if self.kind != "losses" or name != "full"]
            wanted = {"files": [self.file], "rows": rows, **self.wanted}
        described = yaml.safe_dump(wanted, sort_keys=False)
        return tables.render(self.kind, described, RESULTS)


@cache
def _record(file: str) -> dict[str, Any]:
    key = "rows" if "smollm2" in file else "summary"
    return read(RESULTS / file, key)


TEXT = Measure(
    "Log-loss of texts, above that of full KV; SmolLM2 135M",
    *("losses", "losses_smollm2.json.xz", {}),
    figure="loss",
    sign=-1,
    about="Log-loss of texts, less is better",
    unit="nats",
)
FACTS = Measure(
    "First facts of a prompt of 2,048 tokens, asked for after the events; SmolLM2 135M",
    *("language-means", "tasks_smollm2.json.xz"),
    {"part": "tasks", "figures": ["right"]},
    figure="right",
    about="Facts asked for later, more is better",
    unit="points",
)
CHAINS = Measure(
    "Chains of look-ups, lines that are right in their place, in %, by budget; the "
    "packaged model, prompts may be dropped, `hard` has `hard_scope: model`",
    *("budgets", "standard.json.xz", {"score": "lines"}),
)
CONTROLS = Measure(CHAINS.title, "budgets", "controls.json.xz", {"score": "lines"})
TRAINED = Measure(
    "Problems of the packaged model with what was trained for it: lines and final "
    "digits that are right, in %, and mean KV tokens held, relative to full KV",
    *("columns", "compositions.json.xz"),
    {"columns": {"lines": "lines", "digits": "answer", "held": "held_share"}},
)


MEASURES = (TEXT, FACTS, CHAINS, CONTROLS, TRAINED)
CORRECTION = "Intervals are of 95 %, not corrected for the number of names."
CONCLUSIONS = {
    (True, True): f"So it is worth a try. {CORRECTION}",
    (True, False): "So it depends on the rest of the name and on what requests ask "
    f"for: measure it first. {CORRECTION}",
    (False, False): "So nothing here speaks for it: [start with "
    f"another](../which-policy.md). {CORRECTION}",
}
"""By whether any comparison shows it better, and whether all do."""


def words() -> Iterator[tuple[str, str, str, type[Word]]]:
    """Yield the page, the kind, the word and the row of each word, by kind."""
    for kind, (_, rows) in KINDS.items():
        for word, row in rows.items():
            yield f"{FOLDER}{word or EQUAL}.md", kind, word, row


def nav() -> dict[str, list[Any]]:
    """Return the pages as mkdocs' `nav` has them."""
    entries: dict[str, list[Any]] = {}
    for page, kind, word, _ in words():
        entries.setdefault(f"{kind}s", []).append({word or EQUAL: page})
    index: list[Any] = [{"All words": f"{FOLDER}index.md"}]
    return {"Policies": index + [{kind: pages} for kind, pages in entries.items()]}


def pages() -> dict[str, str]:
    """Return all pages in Markdown, by their place on the site."""
    found = {page: write(kind, word, row) for page, kind, word, row in words()}
    return {f"{FOLDER}index.md": write_index(), **found}


def write_index() -> str:
    """Return the page that lists all words."""
    lines = [
        "# Policies",
        "",
        "A policy's name is `[ADMISSION][+[ALLOCATOR-]SCORER][+SELECTION]`, at least "
        "one part, such as `wgkv+ams-snapkv+quest`. [Which one](../which-policy.md) to "
        "start with follows from the same figures as the pages below.",
    ]
    for kind, (does, _) in KINDS.items():
        lines += ["", f"## {kind}s", "", f"A word that {does}.", ""]
        lines += ["| word | what it does | source |", "|---|---|---|"]
        lines += [
            f"| [`{word or EQUAL}`]({Path(page).name}) | {row.summary} | {row.source} |"
            for page, its_kind, word, row in words()
            if its_kind == kind
        ]
    return "\n".join(lines) + "\n"


def write(kind: str, word: str, row: type[Word]) -> str:
    """Return the page of a word."""
    formula, source, deviations = docstring(row)
    name = f"{word}-snapkv" if kind == "Allocator" and word else word or "snapkv"
    parts = [
        f"# `{word}`" if word else "# Equal lengths",
        f"{kind}: a word that {KINDS[kind][0]}. This one: {row.summary}."
        + ("" if word else " It is what a scorer without an allocator gets."),
        f"    vllm serve MODEL --kv-policy {name}{_needed(row)}",
    ]
    if word in PAGES:
        parts.append(f"More about it: [{PAGES[word]}](../{PAGES[word]}.md).")
    parts += [
        f"## Formula\n\n```text\n{formula}\n```",
        f"## Source\n\n{_linked(source)}",
        f"## Deviations\n\n{_linked(deviations)}",
        f"## When to use it\n\n{when(kind, word, row)}",
        *_measured(row),
        f"## Options\n\n{_options(row)}",
    ]
    return "\n\n".join(parts) + "\n"


def _needed(row: type[Word]) -> str:
    """Return the flag with the options that a word does not start without."""
    fields = row.Options.model_fields.items()
    needed = {key: "FILE" for key, each in fields if each.is_required()}
    return f" --kv-policy-config '{json.dumps(needed)}'" if needed else ""


def docstring(row: type[Word]) -> tuple[str, str, str]:
    """Return formula, source and deviations from the module of a word.

    Raises:
        ValueError: the module's docstring lacks one of them.
    """
    place = row.__module__
    text = sys.modules[place].__doc__ or ""
    found = re.fullmatch(
        r"(.+?)\s+Source:\s+(.+?)\s+Deviations(?:: |, )(.+)", text, re.DOTALL
    )
    if found is None:
        raise ValueError(f"{place}: expected 'Source:' and 'Deviations:'")
    formula, source, deviations = found.groups()
    return formula, source, deviations[0].upper() + deviations[1:]


def names_with(row: type[Word], measure: Measure) -> list[str]:
    """Return the policies of a measurement whose names have a word."""
    known = dict.fromkeys(each["policy"] for each in measure.rows)
    known.pop("full", None)
    return [name for name in known if row in parse(name.partition(":")[0]).parts]


def _measured(row: type[Word]) -> Iterator[str]:
    """Yield the tables that have rows of a word."""
    chains = CHAINS if names_with(row, CHAINS) else CONTROLS
    shown = [m for m in (TEXT, FACTS, chains, TRAINED) if names_with(row, m)]
    if shown:
        yield "## Measured"
    for measure in shown:
        known = {each["policy"] for each in measure.rows}
        names = [*names_with(row, measure), *(REFERENCES if measure.figure else ())]
        if measure.figure is None:
            names = ["full", *names]
        names = [name for name in dict.fromkeys(names) if name in known]
        yield f"{measure.title}:"
        yield measure.table(names).rstrip()
    if shown:
        yield (
            "Two small models say where to begin, not what yours will do: [measure "
            "with your own requests](../accuracy.md)."
        )


def when(kind: str, word: str, row: type[Word]) -> str:
    """Return when to use a word, as far as its rows say."""
    if "control" in row.source:
        return "In measurements: a control that others are compared with."
    has_rows = any(names_with(row, each) for each in MEASURES)
    said = []
    if row.fitted:
        said.append(
            "Where you have it for your model: it needs that model's training, or a "
            "file made for it."
        )
    if not has_rows:
        said.append(
            "None of the measurements that these pages show has it, so nothing here "
            "speaks for it: [start with another](../which-policy.md)."
        )
    found = [
        (measure, *pair, *_difference(measure, *pair))
        for measure in (TEXT, FACTS)
        for pair in _pairs(kind, word, row, measure)
    ]
    for measure, name, other, low, mean, high in found:
        shown = " ".join(measure.show(value) for value in (mean, low, high))
        first, _, ends = shown.partition(" ")
        said.append(
            f"* {measure.about}: `{name}` has {first} [{ends.replace(' ', ', ')}] "
            f"{measure.unit} against `{other}`: {measure.verdict(low, high)}."
        )
    verdicts = {measure.verdict(low, high) for measure, *_, low, _, high in found}
    if found:
        said.append(CONCLUSIONS[BETTER in verdicts, verdicts <= {BETTER}])
    elif has_rows:
        said.append("What it does beside others stands in the rows below.")
    return "\n\n".join(said).replace(".\n\n* ", ".\n* ")


def _pairs(
    kind: str, word: str, row: type[Word], measure: Measure
) -> Iterator[tuple[str, str]]:
    """Yield which measured names are compared for a word, and with which.

    An allocator is compared with equal lengths, for each of its scorers; of another
    word the best name with dropping tokens at random.
    """
    values = measure.values
    names = names_with(row, measure)
    if kind == "Allocator" and word:
        scorers = [name.rpartition("-")[2] for name in names]
        pairs = zip(names, scorers, strict=True)
        yield from (pair for pair in pairs if pair[1] in values)
    elif names:
        key = partial(_mean, values, measure.sign)
        yield max(names, key=key), "random"


def _mean(values: Mapping[str, Sequence[float]], sign: int, name: str) -> float:
    return sign * fmean(values[name])


def _difference(measure: Measure, name: str, other: str) -> tuple[float, float, float]:
    """Return the low end, the mean and the high end of a paired difference."""
    some = estimate_difference(measure.values[name], measure.values[other])
    return some.low, some.mean, some.high


def _options(row: type[Word]) -> str:
    """Return the table of the keys of `--kv-policy-config` that a word reads."""
    fields = row.Options.model_fields
    if not fields:
        return "None of its own."
    lines = ["| key | default | meaning |", "|---|---|---|"]
    for key, each in fields.items():
        default = "required" if each.is_required() else f"`{each.default}`"
        lines.append(f"| `{key}` | {default} | {each.description} |")
    return "\n".join(lines)


def _linked(text: str) -> str:
    """Return plain text as Markdown, with links to papers and code."""
    text = re.sub(r"([*_<|])", r"\\\1", text)
    text = WEB.sub(lambda found: f"<{found[0].replace(chr(92), '')}>", text)
    return ARXIV.sub(r"[arXiv \1](https://arxiv.org/abs/\1)", text)
