"""Summarises a run: shares right, paired tests, cost and votes of samples."""

from collections.abc import Iterator, Sequence

from benchmarks.accuracy import measured
from benchmarks.accuracy.cost import cost_from, cost_of, mean_costs
from benchmarks.accuracy.groups import POOLED, Groups, Place, Row, by_question, grouped
from benchmarks.accuracy.margins import margins_of
from benchmarks.accuracy.pairs import pairs_of
from benchmarks.accuracy.partial import PARTIAL, scores_by_question
from benchmarks.accuracy.results import Line
from benchmarks.accuracy.servers import FULL
from benchmarks.accuracy.votes import choices_of, votes_of
from benchmarks.printing import table
from benchmarks.stats import estimate_mean
from reasoner.intervals import wilson

MEASURED_HEADER = ["held", "/ full", "peak held", "/ full", "tok/s", "/ full"]


def summarise(
    lines: Sequence[Line], settings: Line, batches: Sequence[Line] = ()
) -> dict[str, list[Row]]:
    """Return the summary of output lines.

    Args:
        lines: lines of output files, each answer once.
        batches: what servers measured, from the same files.

    Returns:
        `summary`: a row per policy, budget, interval and task, see `row_of`, with
        `measured` where there are batches of it, see `measured_by`; `pairs`: paired
        tests, see `pairs.pairs_of`; `votes`, `margins`: see `votes.votes_of` and
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
        mean over answers whose token ids are known, None where none are; `prefix`,
        `lines`: see `partial.scores_of`, `mean` over questions with its 95 % bootstrap
        interval, `low` to `high`, None where a question has no known trace.
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
        **_partial(members),
    }


def _partial(members: Sequence[Line]) -> Row:
    """Return the estimates of the partial scores."""
    scored = scores_by_question(members)
    if scored is None:
        return dict.fromkeys(PARTIAL)
    return {
        name: estimate_mean([scores[name] for scores in scored.values()]).rounded()
        for name in PARTIAL
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


def format_summary(rows: Sequence[Row]) -> str:
    """Return the rows of a summary as a Markdown table; shares in per cent.

    Partial scores have a dash where they are not known. What servers measured comes
    last, where they did: KV tokens held and their peak, and output tokens per second,
    each also over that of full KV with the range of tasks.
    """
    is_measured = any("measured" in row for row in rows)
    header = ["policy", "budget", "interval", "family", "correct", "% [95 % Wilson]"]
    header += [f"% {name} [95 %]" for name in PARTIAL]
    header += ["prompt tokens", "output tokens", "% capped", "KV read", "KV peak"]
    header += MEASURED_HEADER if is_measured else []
    cells = [
        [
            row["policy"],
            str(row["budget"] or "-"),
            str(row["interval"] or "-"),
            row["family"],
            f"{row['correct']}/{row['answers']}",
            _share(row["accuracy"], row),
            *(
                _share(row[name]["mean"], row[name]) if row[name] else "-"
                for name in PARTIAL
            ),
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


def _share(value: float, ends: Row) -> str:
    low, high = 100 * ends["low"], 100 * ends["high"]
    return f"{100 * value:.1f} [{low:.1f}, {high:.1f}]"


def _whole(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"
