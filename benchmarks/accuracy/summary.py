"""Summarises a run: shares right, paired tests, cost and votes of samples."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.accuracy import measured
from benchmarks.accuracy.cost import cost_of
from benchmarks.accuracy.results import Line
from benchmarks.accuracy.servers import FULL, split
from benchmarks.printing import table
from benchmarks.stats import mcnemar
from reasoner.intervals import wilson

POOLED = "all"
CONTROL = "strat"
"""Allocator that AMS is compared with: equal quotas for equal blocks."""
LENGTHS = (0.25, 0.5, 1.0)
"""Limits of the length of an answer in `votes`, as shares of a task's longest one."""

MEASURED_HEADER = ["held", "/ full", "peak held", "/ full", "tok/s", "/ full"]

Row = dict[str, Any]
Place = tuple[str, int | None, int | None]
"""Policy, budget, interval."""
Groups = dict[tuple[Place, str], list[Line]]


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
        paired tests, see `pairs_of`; `votes`: see `votes_of`, empty with one sample.
        Tasks are pooled under the family `all`.
    """
    groups = grouped(lines)
    known = measured_by(batches, settings["block_size"]) if batches else {}
    return {
        "summary": [
            dict(zip(("policy", "budget", "interval", "family"), names, strict=True))
            | row_of(members, settings)
            | ({"measured": known[names]} if names in known else {})
            for names, members in _named(groups)
        ],
        "pairs": list(pairs_of(groups)),
        "votes": list(votes_of(groups, settings)),
    }


def grouped(lines: Sequence[Line]) -> Groups:
    """Return lines by policy, budget and interval, then by task, in a fixed order."""
    first = {name: index for index, name in enumerate(_names(lines))}
    ordered = sorted(
        lines,
        key=lambda line: (
            line["budget"] or 0,
            line["interval"] or 0,
            first[line["policy"]],
            line["task"],
            *_natural(line),
        ),
    )
    groups: Groups = {}
    for is_pooled in (False, True):
        for line in ordered:
            place = (line["policy"], line["budget"], line["interval"])
            family = POOLED if is_pooled else line["task"]
            groups.setdefault((place, family), []).append(line)
    return groups


def _names(lines: Sequence[Line]) -> list[str]:
    """Return the policies, FULL first, an allocator after its scorer, then variants."""
    names = {line["policy"] for line in lines}

    def place(name: str) -> tuple[bool, str, str, str]:
        policy, variant = split(name)
        allocator, _, scorer = policy.rpartition("-")
        return name != FULL, scorer, allocator, variant

    return sorted(names, key=place)


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


def _natural(line: Line) -> tuple[int, str, int]:
    """Return a sort key of ids: numbers by size, before other names."""
    name = line["id"]
    return int(name) if name.isdigit() else 10**12, name, line["sample"]


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
        held at once, both by arithmetic, see `cost_of`, None where that has nothing to
        say; `repeated`: share of repeated n-grams by n, mean over answers
        whose token ids are known, None where none are.
    """
    tried, correct = len(members), sum(line["correct"] for line in members)
    problems = len(by_question(members))
    low, high = wilson(correct * problems / tried, problems)
    costs = [cost_of(line, settings) for line in members]
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
        **_mean_costs(costs, tried),
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


def by_question(members: Sequence[Line]) -> dict[tuple[str, str], list[Line]]:
    """Return answers by task and id, samples in the order of the lines."""
    questions: dict[tuple[str, str], list[Line]] = {}
    for line in members:
        questions.setdefault((line["task"], line["id"]), []).append(line)
    return questions


def votes_of(groups: Groups, settings: Line) -> Iterator[Row]:
    """Yield the accuracy of majority votes: length x width x ratio.

    Length: answers longer than a share of their task's longest answer have no vote, as
    if cut off there. Width: the first 1, 2, 4... samples vote at once; the answer named
    most often wins, of equally many the one named first. Ratio: policy and budget. Cost
    is summed over the samples, each up to its end or the length; all tasks together
    have no one `length`.
    """
    longest: dict[str, int] = {}
    for lines in groups.values():
        for line in lines:
            longest[line["task"]] = max(
                longest.get(line["task"], 0), line["output_tokens"]
            )
    if not any(line["sample"] for lines in groups.values() for line in lines):
        return
    for ((policy, budget, interval), family), members in groups.items():
        questions = by_question(members)
        width = 1
        while all(len(samples) >= width for samples in questions.values()):
            for share in LENGTHS:
                limits = {t: max(1, round(most * share)) for t, most in longest.items()}
                voting = [
                    (limits[task], samples[:width])
                    for (task, _), samples in questions.items()
                ]
                correct = sum(majority(samples, limit) for limit, samples in voting)
                low, high = wilson(correct, len(voting))
                costs = [
                    cost_of(line, settings, limit)
                    for limit, samples in voting
                    for line in samples
                ]
                yield {
                    "policy": policy,
                    "budget": budget,
                    "interval": interval,
                    "family": family,
                    "share": share,
                    "length": limits.get(family),
                    "width": width,
                    "problems": len(voting),
                    "correct": correct,
                    "accuracy": correct / len(voting),
                    "low": low,
                    "high": high,
                    **_mean_costs(costs, len(voting)),
                }
            width *= 2


def _mean_costs(costs: Sequence[tuple[int, int] | None], count: int) -> Row:
    """Return both costs divided by a count; None if one is unknown."""
    known = [cost for cost in costs if cost is not None]
    if len(known) < len(costs):
        return {"kv_read": None, "kv_peak": None}
    read, peak = (sum(some) / count for some in zip(*known, strict=True))
    return {"kv_read": read, "kv_peak": peak}


def majority(samples: Sequence[Line], length: int | None = None) -> bool:
    """Return whether the most frequent answer of the samples is right.

    Args:
        samples: answers to one question.
        length: answers of more tokens do not vote; None for no limit.
    """
    voters = [
        line
        for line in samples
        if line["answer"] is not None
        and (length is None or line["output_tokens"] <= length)
    ]
    if not voters:
        return False
    # most_common keeps the order of first appearance among equals.
    ((winner, _),) = Counter(line["answer"] for line in voters).most_common(1)
    return next(line["correct"] for line in voters if line["answer"] == winner)


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
