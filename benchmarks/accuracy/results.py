"""Reads and writes the output file of a run: a line of settings, a line per answer.

A run appends to its file and never rewrites it; no answer is in it twice. The answers
of a batch are followed by a line with what the server measured, see `measured.measure`.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import packed

KEY_FIELDS = ("policy", "budget", "interval", "task", "id", "sample")
"""What makes a line unique; budget and interval are None without a policy."""

BATCH = "batch"
"""The only key of a line that is no answer."""

PACKAGED_GROUP = 4
"""Query heads per KV head of the packaged model."""

Line = dict[str, Any]


def key_of(line: Line) -> tuple:
    """Return the key that identifies a line."""
    return tuple(line[field] for field in KEY_FIELDS)


def continue_file(path: Path, settings: Line) -> list[Line]:
    """Return the lines of an earlier run; create the file if there is none.

    Removes an incomplete last line from the file.

    Raises:
        ValueError: the file has other settings, or is not an output file.
    """
    if not path.exists() or not path.stat().st_size:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"settings": settings}) + "\n", encoding="utf-8")
        return []
    text = path.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    found, lines = parse_file(path, whole)
    if found != json.loads(json.dumps(settings)):
        raise ValueError(
            f"{path}: written with {found}, expected {settings}; name another file or "
            "remove this one"
        )
    if whole != text:
        path.write_text(whole, encoding="utf-8")
    return lines


def parse_file(path: Path, text: str) -> tuple[Line, list[Line]]:
    """Return the settings and the answers of a file.

    Args:
        text: contents of the file, complete lines.

    Raises:
        ValueError: not an output file, or an answer occurs twice.
    """
    try:
        rows = [json.loads(row) for row in text.split("\n")[:-1]]
        settings = _completed(rows[0]["settings"])
        lines = [row for row in rows[1:] if BATCH not in row]
        keys = [key_of(line) for line in lines]
    except (json.JSONDecodeError, KeyError, IndexError, TypeError) as error:
        raise ValueError(
            f"{path}: expected the output of benchmarks.accuracy, got {error!r}"
        ) from None
    if len(set(keys)) != len(keys):
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"{path}: expected each answer once, got {twice} again")
    return settings, lines


def _completed(settings: Line) -> Line:
    """Return settings with the keys that files did not have at first.

    Those files are of servers of the packaged model, which dropped prompts or kept them
    as the policy does by default. A server of `--url` has no known group size. The
    language benchmark's settings, without `own_server`, are complete.
    """
    if "own_server" not in settings:
        return settings
    group = PACKAGED_GROUP if settings["own_server"] else None
    return {"group_size": group, "keep_prompts": False, **settings}


def batches_of(paths: Sequence[Path]) -> list[Line]:
    """Return what servers measured, from output files."""
    rows = [
        json.loads(row) for path in paths for row in _whole_lines(path).split("\n")[:-1]
    ]
    return [row[BATCH] for row in rows if BATCH in row]


def _whole_lines(path: Path) -> str:
    """Return a file's complete lines."""
    text = packed.read_text(path)
    return text[: text.rfind("\n") + 1]


def check_digests(lines: Iterable[Line], digests: dict[tuple[str, str], str]) -> None:
    """Check that the answers in a file belong to today's questions.

    Args:
        digests: digests by task and id; lines of other questions are not checked.

    Raises:
        ValueError: a question has changed.
    """
    for line in lines:
        now = digests.get((line["task"], line["id"]), line["digest"])
        if now != line["digest"]:
            raise ValueError(
                f"task: {line['task']} {line['id']} is another question than the one "
                "on file; name another file"
            )


def _joined(settings: Line, found: Line, path: Path) -> Line:
    """Return settings with the variants of a further file, or raise ValueError."""
    known, own = settings.get("variants", {}), found.get("variants", {})
    variants = {"variants": known | own} if "variants" in settings else {}
    is_same = {**settings, **variants} == {**found, **variants}
    if not is_same or any(known[name] != own[name] for name in known.keys() & own):
        raise ValueError(f"{path}: written with {found}, the others with {settings}")
    return {**settings, **variants}


def merge(paths: Sequence[Path]) -> tuple[Line, list[Line]]:
    """Return the settings and the lines of several files, such as all shards.

    The variants are those of all files.

    Args:
        paths: output files; `.xz` ones are packed.

    Raises:
        ValueError: settings differ, or an answer is in two files.
    """
    settings: Line | None = None
    lines: dict[tuple, Line] = {}
    for path in paths:
        found, more = parse_file(path, _whole_lines(path))
        settings = found if settings is None else _joined(settings, found, path)
        for line in more:
            if lines.setdefault(key_of(line), line) is not line:
                raise ValueError(f"{path}: {key_of(line)} is in another file, too")
    if settings is None:
        raise ValueError("files: expected at least one, got none")
    return settings, list(lines.values())
