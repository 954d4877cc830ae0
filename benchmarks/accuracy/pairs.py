"""Compares policies in pairs, question by question."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

from benchmarks.accuracy.groups import Groups, Place, Row, by_question, majority
from benchmarks.accuracy.partial import PARTIAL, Scores, scores_by_question
from benchmarks.accuracy.results import Line
from benchmarks.accuracy.servers import FULL, split
from benchmarks.printing import table
from benchmarks.stats import estimate_difference, mcnemar
from vllm_kvpolicy.policies.names import SCORERS, parse

CONTROL = "strat"
"""Allocator that AMS is compared with: equal quotas for equal blocks."""
NO_SCORER = "random"
"""What scorers are compared with."""
REPEATED, NGRAM = "repeated", "8"
"""The share of an answer's n-grams that it has had before, and n."""

Question = tuple[str, str]
"""Task and id."""


def bases_of(policy: str) -> list[str]:
    """Return the policies that a policy is compared with.

    FULL; itself without its variant; itself without its allocator or one of its parts,
    also with the same variant; AMS with equal quotas for equal blocks, and a scorer
    alone (not an admission or selection) with NO_SCORER.
    """
    if policy == FULL:
        return []
    name, variant = split(policy)
    bases = [FULL, name]
    simpler = list(_simpler(name)) or [NO_SCORER] * (name in SCORERS)
    for other in simpler:
        bases += [other, f"{other}:{variant}"] if variant else [other]
    if any(part.startswith("ams-") for part in name.split("+")):
        bases.append(name.replace("ams-", f"{CONTROL}-"))
    return [base for base in dict.fromkeys(bases) if base != policy]


def _simpler(name: str) -> Iterator[str]:
    """Yield a policy without its allocator, then without each of several parts."""
    parts = name.split("+")
    for place, part in enumerate(parts):
        if "-" in part:
            scorer = part.rpartition("-")[2]
            yield "+".join([*parts[:place], scorer, *parts[place + 1 :]])
    if len(parts) > 1:
        for place in range(len(parts)):
            yield "+".join(parts[:place] + parts[place + 1 :])


def pairs_of(groups: Groups) -> Iterator[Row]:
    """Yield the paired tests: each policy against FULL and its bases, see `bases_of`.

    A pair is one question, answered by both; several samples answer by majority.
    `only_policy` and `only_other` count the pairs that just one of the two got right;
    `p` is McNemar's exact two-sided value. `prefix` and `lines`, see `partial`: the
    `mean` of the policy's score minus the other's, its 95 % paired bootstrap interval,
    `low` to `high`, and the sign-flip test's two-sided `p`; None where a question has
    no known trace. `repeated`: the same of the share of repeated NGRAM-grams, None
    where the tokens of an answer are not known. No p is corrected for the number of
    tests.
    """
    voted = {
        names: {
            question: majority(samples)
            for question, samples in by_question(members).items()
        }
        for names, members in groups.items()
    }
    scored = {names: scores_by_question(members) for names, members in groups.items()}
    places = list(dict.fromkeys(place for place, _ in groups))
    for ((policy, budget, interval), family), ours in voted.items():
        for base in bases_of(policy):
            other = _place_of(base, (policy, budget, interval), places)
            theirs = voted.get((other, family), {})
            both = [question for question in ours if question in theirs]
            if both:
                yield {
                    "policy": policy,
                    "budget": budget,
                    "interval": interval,
                    "family": family,
                    "against": base,
                    "pairs": len(both),
                    **_answers(both, ours, theirs),
                    **_scores(
                        both,
                        scored[(policy, budget, interval), family],
                        scored[other, family],
                    ),
                    REPEATED: _repetition(
                        both,
                        by_question(groups[(policy, budget, interval), family]),
                        by_question(groups[other, family]),
                    ),
                }


def _place_of(base: str, ours: Place, places: Sequence[Place]) -> Place:
    """Return where a base was run; FULL and what reads no budget, once for all."""
    _, budget, interval = ours
    if base == FULL:
        return FULL, None, None
    for place in places:
        # Only what was run is sure to be a policy.
        is_there = (place[0], place[2]) == (base, interval)
        if is_there and parse(split(base)[0]).is_unbounded:
            return place
    return base, budget, interval


def _answers(
    both: Sequence[Question],
    ours: Mapping[Question, bool],
    theirs: Mapping[Question, bool],
) -> Row:
    """Return the comparison of right answers."""
    counts = Counter((ours[question], theirs[question]) for question in both)
    alone = counts[True, False], counts[False, True]
    return {"only_policy": alone[0], "only_other": alone[1], "p": mcnemar(*alone)}


def _scores(
    both: Sequence[Question],
    ours: Mapping[Question, Scores] | None,
    theirs: Mapping[Question, Scores] | None,
) -> Row:
    """Return the comparison of the partial scores."""
    if ours is None or theirs is None:
        return dict.fromkeys(PARTIAL)
    return {
        name: estimate_difference(
            [ours[question][name] for question in both],
            [theirs[question][name] for question in both],
        ).rounded()
        for name in PARTIAL
    }


def _repetition(
    both: Sequence[Question],
    ours: Mapping[Question, Sequence[Line]],
    theirs: Mapping[Question, Sequence[Line]],
) -> Row | None:
    """Return the comparison of repetition, None where it is not known."""
    if not all(
        line["repeated"] for some in (ours, theirs) for q in both for line in some[q]
    ):
        return None
    rates = [
        [fmean(line["repeated"][NGRAM] for line in some[question]) for question in both]
        for some in (ours, theirs)
    ]
    return estimate_difference(*rates).rounded()


def difference_of(found: Mapping[str, float]) -> str:
    """Return a difference of scores in points, with its interval."""
    mean, low, high = (100 * found[key] for key in ("mean", "low", "high"))
    return f"{mean:+.1f} [{low:.1f}, {high:.1f}]"


def _with_p(found: Mapping[str, float] | None) -> str:
    return f"{difference_of(found)}, {found['p']:.2g}" if found else "-"


def format_pairs(rows: Sequence[Row]) -> str:
    """Return the paired tests as a Markdown table."""
    header = ["policy", "budget", "interval", "family", "against", "pairs"]
    header += ["only policy right", "only other right", "McNemar p"]
    header += [f"{name}, difference [95 %], p" for name in PARTIAL]
    cells = [
        [
            row["policy"],
            str(row["budget"]),
            str(row["interval"]),
            row["family"],
            row["against"],
            *(str(row[key]) for key in ("pairs", "only_policy", "only_other")),
            f"{row['p']:.2g}",
            *(_with_p(row[name]) for name in PARTIAL),
        ]
        for row in rows
    ]
    return table(header, cells)
