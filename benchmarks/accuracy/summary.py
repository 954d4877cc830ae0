"""Summarises a run: shares right, paired tests, cost and votes of samples."""

from collections import Counter
from collections.abc import Iterator, Sequence

from benchmarks.accuracy import measured
from benchmarks.accuracy.cost import cost_from, cost_of, mean_costs
from benchmarks.accuracy.groups import (
    POOLED,
    Groups,
    Place,
    Row,
    by_question,
    grouped,
    majority,
)
from benchmarks.accuracy.margins import margins_of
from benchmarks.accuracy.results import Line
from benchmarks.accuracy.servers import FULL, split
from benchmarks.accuracy.votes import choices_of, votes_of
from benchmarks.printing import table
from benchmarks.stats import mcnemar
from reasoner.intervals import wilson

CONTROL = "strat"
"""Allocator that AMS is compared with: equal quotas for equal blocks."""

MEASURED_HEADER = ["held", "/ full", "peak held", "/ full", "tok/s", "/ full"]


def summarise(
    lines: Sequence[Line], settings: Line, batches: Sequence[Line] = ()
) -> dict[str, list[Row]]:
    """Return the summary of output lines.

    Args:
        lines: lines of output files, each answer once.
        settings: settings of those files.
        batches: what servers measured, from the same files.

    Returns:
        `summary`: a row per policy, budget, interval and task, see `row_of`, with
        `measured` where there are batches of it, see `measured_by`; `pairs`:
        paired tests, see `pairs_of`; `votes`, `margins`: see `votes.votes_of` and
        `margins.margins_of`, empty with one sample.
        Tasks are pooled under the family `all`.
    """
    groups = grouped(lines)
    choices = choices_of(groups, settings)
    known = measured_by(batches, settings["block_size"]) if batches else {}
    return {
        "summary": [
            dict(zip(("policy", "budget", "interval", "family"), names, strict=True))
            | row_of(members, settings)
            | ({"measured": known[names]} if names in known else {})
            for names, members in _named(groups)
        ],
        "pairs": list(pairs_of(groups)),
        "votes": list(votes_of(choices)),
        "margins": list(margins_of(choices)),
    }


def bases_of(policy: str) -> list[str]:
    """Return the policies that a policy is compared with.

    FULL; itself without its variant; its scorer without an allocator, and with the same
    variant; and AMS with equal quotas for equal blocks.
    """
    if policy == FULL:
        return []
    name, variant = split(policy)
    allocator, _, scorer = name.rpartition("-")
    bases = [FULL, name, scorer, f"{scorer}:{variant}" if variant else scorer]
    bases += [f"{CONTROL}-{scorer}"] if allocator == "ams" else []
    return [base for base in dict.fromkeys(bases) if base != policy]


def _named(groups: Groups) -> Iterator[tuple[tuple, list[Line]]]:
    for (place, family), members in groups.items():
        yield (*place, family), members


def row_of(members: Sequence[Line], settings: Line) -> Row:
    """Return the figures of answers.

    Returns:
        `problems`: questions; `answers`: to them; `correct`: right answers; `accuracy`:
        their share; `low`, `high`: its 95 % Wilson interval for so many questions,
        which is too wide rather than too narrow beside several samples; `score`: mean;
        `capped`: share cut off; mean tokens of prompt and
        output; `kv_read`: mean KV tokens read in decoding; `kv_peak`: mean of the most
        held at once, see `cost_of`, None where an answer's are not known; `cost_from`:
        what they follow from, see there; `repeated`: share of repeated n-grams by n,
        mean over answers whose token ids are known, None where none are.
    """
    tried, correct = len(members), sum(line["correct"] for line in members)
    problems = len(by_question(members))
    low, high = wilson(correct * problems / tried, problems)
    costs = [cost_of(line, settings) for line in members]
    sources = {cost_from(line, settings) for line in members}
    known = [line["repeated"] for line in members if line["repeated"]]

    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(values)

    return {
        "problems": problems,
        "answers": tried,
        "correct": correct,
        "accuracy": correct / tried,
        "low": low,
        "high": high,
        "score": mean([line["score"] for line in members]),
        "mean_prompt_tokens": mean([line["prompt_tokens"] for line in members]),
        "mean_output_tokens": mean([line["output_tokens"] for line in members]),
        "capped": mean([line["capped"] for line in members]),
        **mean_costs(costs, tried),
        "cost_from": None
        if None in sources
        else " and ".join(sorted(filter(None, sources))),
        "repeated": {size: mean([rates[size] for rates in known]) for size in known[0]}
        if known
        else None,
    }


def measured_by(batches: Sequence[Line], block_size: int) -> dict[tuple, Row]:
    """Return measured figures by policy, budget, interval and family.

    Returns:
        `measured.figures`, with `to_full`, see `measured.ratios_to_full`.
    """
    by_place: dict[Place, dict[str, list[Line]]] = {}
    for batch in batches:
        *place, task = measured.place_of(batch)
        families = by_place.setdefault(tuple(place), {})
        for family in (task, POOLED):
            families.setdefault(family, []).append(batch)
    found = {
        place: {f: measured.figures(some, block_size) for f, some in families.items()}
        for place, families in by_place.items()
    }
    full = found.get((FULL, None, None), {})
    rows: dict[tuple, Row] = {}
    for place, families in found.items():
        ratios = measured.ratios_to_full(families, full, POOLED)
        for family, row in families.items():
            rows[(*place, family)] = row | {"to_full": ratios.get(family, {})}
    return rows


def pairs_of(groups: Groups) -> Iterator[Row]:
    """Yield the paired tests: each policy against FULL and its bases, see `bases_of`.

    A pair is one question, answered by both; several samples answer by majority.
    `only_policy` and `only_other` count the pairs that just one of the two got right;
    `p` is McNemar's exact two-sided value, not corrected for the number of tests.
    """
    voted = {
        names: {
            question: majority(samples)
            for question, samples in by_question(members).items()
        }
        for names, members in groups.items()
    }
    for ((policy, budget, interval), family), ours in voted.items():
        for base in bases_of(policy):
            other = (FULL, None, None) if base == FULL else (base, budget, interval)
            theirs = voted.get((other, family), {})
            both = [(right, theirs[q]) for q, right in ours.items() if q in theirs]
            if both:
                counts = Counter(both)
                ours_only, theirs_only = counts[True, False], counts[False, True]
                yield {
                    "policy": policy,
                    "budget": budget,
                    "interval": interval,
                    "family": family,
                    "against": other[0],
                    "pairs": len(both),
                    "only_policy": ours_only,
                    "only_other": theirs_only,
                    "p": mcnemar(ours_only, theirs_only),
                }


def format_summary(rows: Sequence[Row]) -> str:
    """Return the rows of a summary as a Markdown table; shares in per cent.

    What servers measured comes last, where they did: KV tokens held and their peak, and
    output tokens per second, each also over that of full KV with the range of tasks.
    """
    is_measured = any("measured" in row for row in rows)
    header = ["policy", "budget", "interval", "family", "correct", "% [95 % Wilson]"]
    header += ["prompt tokens", "output tokens", "% capped", "KV read", "KV peak"]
    header += MEASURED_HEADER if is_measured else []
    cells = [
        [
            row["policy"],
            str(row["budget"] or "-"),
            str(row["interval"] or "-"),
            row["family"],
            f"{row['correct']}/{row['answers']}",
            f"{100 * row['accuracy']:.1f} [{100 * row['low']:.1f}, "
            f"{100 * row['high']:.1f}]",
            f"{row['mean_prompt_tokens']:.0f}",
            f"{row['mean_output_tokens']:.0f}",
            f"{100 * row['capped']:.1f}",
            _whole(row["kv_read"]),
            _whole(row["kv_peak"]),
            *(_measured_cells(row.get("measured", {})) if is_measured else []),
        ]
        for row in rows
    ]
    return table(header, cells)


def _measured_cells(found: Row) -> list[str]:
    """Return the cells of a row under MEASURED_HEADER."""
    cells = []
    for name in measured.COMPARED:
        cells.append(_whole(found.get(name)))
        ratio = found.get("to_full", {}).get(name)
        if ratio is None:
            cells.append("-")
        elif ratio["low"] is None:
            cells.append(f"{ratio['ratio']:.2f}")
        else:
            low, high = ratio["low"], ratio["high"]
            cells.append(f"{ratio['ratio']:.2f} ({low:.2f} to {high:.2f})")
    return cells


def _whole(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def format_pairs(rows: Sequence[Row]) -> str:
    """Return the paired tests as a Markdown table."""
    header = ["policy", "budget", "interval", "family", "against", "pairs"]
    header += ["only policy right", "only other right", "McNemar p"]
    cells = [
        [
            row["policy"],
            str(row["budget"]),
            str(row["interval"]),
            row["family"],
            row["against"],
            *(str(row[key]) for key in ("pairs", "only_policy", "only_other")),
            f"{row['p']:.2g}",
        ]
        for row in rows
    ]
    return table(header, cells)
