"""What `vllm-kvpolicy top` shows: a frame of what a server tells, for a terminal.

Bars are of plain characters, so that a frame says the same without colours and in a
file. The level is that of the live page.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from vllm_kvpolicy.config_keys import PRESSURE

Facts = Mapping[str, Any]  # of GET /kv_policy
Engine = Mapping[str, Any]  # of GET /kv_policy/requests
Rates = Mapping[str, float | None]
BAR_WIDTH = 32
LOCAL, SURVIVORS, FREE, LEVEL = "#", "=", ".", "|"
STYLES = {LOCAL: "blue", SURVIVORS: "cyan", FREE: "dim", LEVEL: "bold red"}
# Names of rates, in the order of the line that has them, and what they count.
RATES = {
    "events": "events",
    "dropped": "tokens dropped per head",
    "generated": "generated",
    "prompt": "of prompts",
}
COLUMNS = ("request", "policy", "computed", "held", "kept", "least", "blocks", "events")


def frame(
    facts: Facts,
    engines: Sequence[Engine],
    rates: Rates,
    most_rows: int | None,
    trouble: str = "",
) -> RenderableType:
    """Return a frame.

    Args:
        rates: by the names of `RATES`, a second; None where the server does not tell.
        most_rows: requests that are listed; None for all.
        trouble: why what is shown is old, empty where it is not.

    Raises:
        LookupError: the server tells less than the live routes of this version.
    """
    grid = Table.grid(padding=(0, 2))
    grid.add_row("server", _server(facts, trouble))
    for engine in engines:
        label = f"pool {engine['engine']}" if len(engines) > 1 else "pool"
        grid.add_row(label, _pool(engine, facts["block_size"]))
    grid.add_row("requests", _counts(engines))
    grid.add_row("a second", _rates(rates))
    rows = [row for engine in engines for row in engine["requests"]]
    rows.sort(key=lambda row: (not row["running"], -row["held"]))
    shown = rows[:most_rows]
    parts: list[RenderableType] = [grid]
    if shown:
        parts += ["", _table(shown)]
    num_all = sum(engine["running"] + engine["waiting"] for engine in engines)
    if num_all > len(shown):
        parts.append(Text(f"and {num_all - len(shown):,} more", "dim"))
    return Group(*parts)


def _server(facts: Facts, trouble: str) -> Text:
    budget = f"{facts['budget']:,} tokens per KV head"
    if share := facts.get("budget_text"):
        budget = f"{share} of each request, at most {budget}"
    if facts["events"] == PRESSURE:
        when = f"cut when the pool runs short, not below {budget}"
    else:
        when = f"budget {budget}, an event every {facts['interval']:,} tokens"
    line = Text(printable(f"{facts['policy']} on {facts['model']}") + f"\n{when}")
    elsewhere = facts["all_engines"] - len(facts["engines"])
    if elsewhere > 0:
        line.append(f"; {elsewhere} engines on other hosts are not shown")
    if trouble:
        line.append(f"\n{printable(trouble)}", "bold red")
    return line


def _pool(engine: Engine, block_size: int) -> Text:
    """Return the bar of a pool, and what it says in words."""
    pool, level = engine["pool"], level_of(engine)
    total = pool["total"] or 1
    used = pool["local"] + pool["global"]
    ends = [round(BAR_WIDTH * each / total) for each in (pool["local"], used)]
    marks = LOCAL * ends[0] + SURVIVORS * (ends[1] - ends[0])
    marks = marks.ljust(BAR_WIDTH, FREE)[:BAR_WIDTH]
    told = f" {used / total:.0%} of {pool['total']:,} superblocks\n"
    told += f"{LOCAL} {pool['local']:,} local, {SURVIVORS} {pool['global']:,} survivors"
    if pool["stock"]:
        told += f"; stock would hold {pool['stock']:,}"
    if level:
        held = held_at_level(engine, block_size)
        place = min(BAR_WIDTH - 1, round(BAR_WIDTH * held / total))
        marks = marks[:place] + LEVEL + marks[place + 1 :]
        told += f"\n{LEVEL} level: {level:,.0f} tokens per KV head, "
        told += f"{held:,.0f} superblocks if all were cut to it"
    if engine["counters"].get("observers_off_live"):
        told += "\nthe engine tells of no requests any more: see its log"
    elif not engine["fresh"]:
        told += "\nthe engine has not told lately"
    return Text.assemble("[", *((mark, STYLES[mark]) for mark in marks), "]", told)


def level_of(engine: Engine) -> float:
    """Return to how many tokens per KV head calls cut; 0 where nobody is cut."""
    is_cut = any(row["running"] and not row["uncut"] for row in engine["requests"])
    return engine["counters"].get("level_tokens", 0) if is_cut else 0


def held_at_level(engine: Engine, block_size: int) -> float:
    """Return the superblocks that requests would hold if all were cut to the level."""
    level, above = level_of(engine), 0
    for row in engine["requests"]:
        if row["floor"] is not None:
            least = max(level + row["pinned"], row["floor"])
            above += max(row["held"] - least, 0)
    pool = engine["pool"]
    return pool["local"] + pool["global"] - above // block_size


def _counts(engines: Sequence[Engine]) -> str:
    running, waiting, could = (
        sum(engine[name] for engine in engines)
        for name in ("running", "waiting", "stock_running")
    )
    told = f"{running:,} run, {waiting:,} wait"
    if could < running:
        told += f"; stock could run {could:,}"

    def total(*names: str) -> int:
        return sum(
            int(engine["counters"].get(name, 0)) for engine in engines for name in names
        )

    ended = total("bounded_requests")
    return (
        f"{told}\nsince the start "
        f"{total('preemptions_bounded', 'preemptions_unbounded'):,} preemptions, "
        f"{total('events'):,} events; {ended - total('uncut_requests'):,} of {ended:,} "
        "that ended were cut"
    )


def _rates(rates: Rates) -> str:
    told = ((rates[name], what) for name, what in RATES.items())
    return ", ".join(
        f"{what}: not told"
        if rate is None
        else f"{rate:,.{int(0 < rate < 10)}f} {what}"
        for rate, what in told
    )


def _table(rows: Iterable[Mapping[str, Any]]) -> Table:
    """Return a line for each request; tokens are per KV head."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column(COLUMNS[0], min_width=8)  # alone gives way where it is narrow
    table.add_column(COLUMNS[1], no_wrap=True)
    for name in COLUMNS[2:]:
        table.add_column(name, no_wrap=True, justify="right")
    for row in rows:
        computed, held = row["computed"], row["held"]
        kept = f"{held / computed:.0%}" if computed else "-"
        least = row["budget"] if row["floor"] is None else row["floor"]
        policy = row["policy"] if row["running"] else f"{row['policy']} (waits)"
        table.add_row(
            Text(printable(row["id"]), no_wrap=True, overflow="ellipsis"),
            Text(printable(policy)),
            *(f"{computed:,}", f"{held:,}"),
            "all" if computed and row["uncut"] else kept,
            "-" if least is None else f"{least:,}",
            *(f"{row['blocks']:,}", f"{row['events']:,}"),
            style="" if row["running"] else "dim",
        )
    return table


def printable(text: str) -> str:
    """Return a text without what a terminal would obey; ids are what clients choose."""
    return "".join(each if each.isprintable() else "?" for each in text)
