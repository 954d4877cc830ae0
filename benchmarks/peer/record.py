"""Assembles the record: the peer's rows, ours, and paired tests."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.accuracy import results, summary
from benchmarks.accuracy.groups import POOLED, Row, grouped
from benchmarks.accuracy.results import Line
from benchmarks.accuracy.servers import options_of
from benchmarks.peer.catalogue import FULL, PRESSES
from benchmarks.peer.facts import Refusal, place_of
from benchmarks.peer.joining import Read, against_ours, check_same
from benchmarks.peer.ours import speeds_of
from vllm_kvpolicy.config import KVPolicyConfig


def assemble(folder: Path, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record of a folder.

    Args:
        folder: with `peer.jsonl`, and `ours-C.jsonl` by concurrency C; not all need be
            there.
        facts: see `facts`; of our files only those are read whose concurrency the last
            command named.

    Returns:
        `peer_part`; `ours`, see `our_part`; `against_ours`, see there.

    Raises:
        ValueError: files are not comparable, see `joining.check_same`.
    """
    peer = folder / "peer.jsonl"
    counts = facts.get("ours", {}).get("concurrencies", [])
    paths = {count: folder / f"ours-{count}.jsonl" for count in sorted(counts)}
    theirs = {peer: read(peer)} if "ask" in facts and peer.exists() else {}
    ours = {count: read(path) for count, path in paths.items() if path.exists()}
    files = theirs | {paths[count]: found for count, found in ours.items()}
    if files:
        check_same(files)
    made: dict[str, Any] = {}
    if theirs:
        settings, lines = theirs[peer]
        made = {"provenance": facts["ask"]["provenance"]}
        made |= peer_part(lines, settings, facts["ask"]["refused"])
    if ours:
        made["ours"] = {"provenance": facts["ours"]["provenance"]} | our_part(ours)
    if theirs and ours:
        made["against_ours"] = list(against_ours(lines, ours[min(ours)][1]))
    return made


def peer_part(
    lines: Sequence[Line], settings: Line, refused: Sequence[Refusal]
) -> dict[str, Any]:
    """Return the peer's part of the record.

    Returns:
        `summary` and `pairs`, those of all tasks together, see `summary.summarise`,
        with `kv_read` and `kv_peak` as measured and the columns of `more_of`;
        `refused`; `notes` by policy.
    """
    whole = summary.summarise(lines, settings)
    groups = grouped(lines)
    for row in whole["summary"]:
        row |= more_of(groups[place_of(row), row["family"]])
    policies = {one["policy"] for one in (*lines, *refused)}
    return {
        "settings": settings,
        "summary": whole["summary"],
        "pairs": [pair for pair in whole["pairs"] if pair["family"] == POOLED],
        "refused": list(refused),
        "notes": {name: PRESSES[name].note for name in PRESSES if name in policies},
    }


def more_of(members: Sequence[Line]) -> Row:
    """Return the measured columns of a row.

    Returns:
        `kv_read`, `kv_peak`, `kept_mean`, `revived`: means of the lines; `sinks_held`:
        after the first event, the second and the last, over the answers that had one;
        `tok_s`: output tokens per second of one answer after the other.
    """
    tokens = sum(line["output_tokens"] for line in members)
    seconds = sum(line["seconds"] for line in members)
    shares = [line["sinks_held"] for line in members if line["sinks_held"]]
    return {
        "kv_read": mean_of(members, "kv_read"),
        "kv_peak": mean_of(members, "kv_peak"),
        "events": mean_of(members, "events"),
        "kept_mean": mean_of(members, "kept_mean"),
        "revived": mean_of(members, "revived"),
        "sinks_held": {
            "first": _mean(share[0] for share in shares),
            "second": _mean(share[1] for share in shares if share[1:]),
            "last": _mean(share[-1] for share in shares),
        },
        "tok_s": round(tokens / seconds, 1),
    }


def mean_of(members: Sequence[Line], name: str) -> float | None:
    """Return the mean of a figure over the lines that have it, None if none has."""
    return _mean(line[name] for line in members if line[name] is not None)


def _mean(values: Iterable[float]) -> float | None:
    known = list(values)
    return round(mean(known), 4) if known else None


def our_part(files: Mapping[int, Read]) -> dict[str, Any]:
    """Return our part of the record.

    Args:
        files: contents of the output file of each concurrency.

    Returns:
        `settings` and `summary` of the smallest concurrency, see `summary.summarise`,
        with `kept_mean`, tokens that a head keeps, mean over events; `speeds` of all,
        see `ours.speeds_of`.
    """
    settings, lines = files[min(files)]
    rows, groups = summary.summarise(lines, settings)["summary"], grouped(lines)
    for row in rows:
        members = groups[place_of(row), row["family"]]
        kept = [count for line in members for count in kept_of(line, settings)]
        row["kept_mean"] = _mean(kept)
    return {
        "settings": settings,
        "summary": rows,
        "speeds": [row for c in sorted(files) for row in speeds_of(files[c][1], c)],
    }


def kept_of(line: Line, settings: Line) -> list[int]:
    """Return the tokens that a head of our server keeps at each event of an answer.

    Survivors fill whole blocks of N tokens, so this is budget to budget + N - 1.
    """
    if line["policy"] == FULL:
        return []
    if ":" in line["policy"]:  # would be imported
        raise ValueError(f"policy: got {line['policy']!r}, expected a word of ours")
    block, prompt = settings["block_size"], line["prompt_tokens"]
    config = {name: line[name] for name in ("policy", "budget", "interval")}
    config["pin"] = "none"
    config["policy_config"] = options_of((line["policy"],), "", settings)
    config["spread_events"] = False  # the answers come from servers without
    plan = KVPolicyConfig.from_dict(config).footprint(prompt, block, query_rows=1)
    last = prompt + line["output_tokens"] - 1

    def kept(position: int) -> int:
        gone = plan.frontier_blocks(position) - plan.global_blocks(position)
        return position - gone * block

    return [kept(position) for position in plan.events.positions_up_to(last)]


def read(path: Path) -> tuple[Line, list[Line]]:
    """Return the settings and the lines of an output file.

    Raises:
        ValueError: it is not an output file.
    """
    return results.parse_file(path, path.read_text(encoding="utf-8"))
