"""Reads local files of problems: one JSON object per line."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LONGBENCH = "longbench-"


@dataclass(frozen=True)
class Format:
    """The keys of one kind of file.

    Attributes:
        answer: keys of the answer: a text, a number or a list of texts.
        id: keys of the id; without one it is the line number.
        max_tokens: default for the most tokens of an answer.
        after: mark within the value after which the answer begins, such as `####`.
    """

    question: tuple[str, ...]
    answer: tuple[str, ...]
    id: tuple[str, ...]
    max_tokens: int
    context: tuple[str, ...] = ()
    is_math: bool = True
    after: str = ""


@dataclass(frozen=True)
class Row:
    """One problem of a file: id, question and right answers."""

    id: str
    prompt: str
    answers: tuple[str, ...]


_AIME = Format(("problem", "Problem"), ("answer", "Answer"), ("id", "ID"), 16384)
FORMATS = {
    "math500": Format(("problem",), ("answer",), ("unique_id",), 8192),
    "aime24": _AIME,
    "aime25": _AIME,
    "gsm8k": Format(("question",), ("answer",), ("id",), 2048, after="####"),
    "umath": Format(("problem_statement",), ("golden_answer",), ("uuid",), 8192),
}
_LONGBENCH = Format(
    ("input",), ("answers",), ("_id",), 256, context=("context",), is_math=False
)


def is_known(task: str) -> bool:
    """Return whether a task is read from a file."""
    return task in FORMATS or (task.startswith(LONGBENCH) and task != LONGBENCH)


def names() -> list[str]:
    """Return the tasks that are read from files."""
    return [*FORMATS, f"{LONGBENCH}NAME"]


def format_of(task: str) -> Format:
    """Return the format of a task's file."""
    return FORMATS.get(task, _LONGBENCH)


def read(task: str, folder: Path) -> list[Row]:
    """Return the problems of a task in the order of its file.

    U-MATH's rows with `has_image` are skipped, because they need an image.

    Raises:
        ValueError: no such file, a line that is not a JSON object, a key that is
            missing, an answer of another kind, or an id that comes twice.
    """
    path = folder / f"{task}.jsonl"
    if not path.is_file():
        raise ValueError(
            f"task: expected {path} for {task!r}, got no such file; name its folder "
            "with --data"
        )
    form, rows = format_of(task), []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        where = f"{path.name}:{number}"
        try:
            values = json.loads(line) if line.strip() else {"has_image": True}
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: expected a JSON object, {error}") from None
        if not isinstance(values, dict):
            raise ValueError(f"{where}: expected a JSON object, got {line[:40]!r}")
        if not values.get("has_image"):
            rows.append(_row(values, form, number, where))
    ids = [row.id for row in rows]
    twice = sorted({name for name in ids if ids.count(name) > 1})
    if twice:
        raise ValueError(f"{path.name}: expected each id once, got {twice} again")
    return rows


def _row(values: Mapping[str, Any], form: Format, number: int, where: str) -> Row:
    question = str(_value(values, form.question, where))
    context = [str(_value(values, form.context, where))] if form.context else []
    found = _value(values, form.answer, where)
    answers = [str(item) for item in (found if isinstance(found, list) else [found])]
    if form.after:
        answers = [answer.rpartition(form.after)[2] for answer in answers]
    answers = [answer.strip() for answer in answers]
    if not answers or not all(answers):
        raise ValueError(f"{where}: expected an answer, got {found!r}")
    has_id = any(key in values for key in form.id)
    name = _value(values, form.id, where) if has_id else number
    return Row(str(name), "\n\n".join([*context, question]), tuple(answers))


def _value(values: Mapping[str, Any], keys: tuple[str, ...], where: str) -> Any:
    for key in keys:
        if values.get(key) is not None:
            return values[key]
    raise ValueError(f"{where}: expected the key {' or '.join(keys)}, got none")
