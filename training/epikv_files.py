"""Reads and writes the traces of EpiKV's calibration, and compares answers.

A trace is one JSON object per line:

* `token_ids`: prompt and answer; `prompt_len`: tokens of the prompt
* `ground_truth` and `correct`
* `signals`, from epikv-collect: by name, one number per token
* `importance`, from epikv-labels: one label per token, 1 where the answer depends on
  it, 0 where it does not, -1 in the answer itself

Source: the file format of https://github.com/stevenkolawole/epiphany-kv-cache/blob/d424208/scripts.
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

Trace = dict[str, Any]
TRACE_KEYS = ("token_ids", "prompt_len")
PROBLEM_KEYS = ("problem", "ground_truth")
STEP_SIGNAL = "hs_l2_diff_l"  # a layer's step; the layer's number follows
THINK_END, BOXED = "</think>", "\\boxed{"
ANSWER_TOKENS = 64  # length of an answer that nothing marks
_SILENT = re.compile(r"\\(?:left|right|[,;!])|[\s$]")


def read_lines(path: Path, keys: Sequence[str] = TRACE_KEYS) -> list[dict[str, Any]]:
    """Read a file with one JSON object per line.

    Raises:
        ValueError: the file cannot be read, or a line is not such an object.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {str(path)!r}: {error}") from None
    values = []
    for number, line in enumerate(lines, 1):
        value = _parsed(line, keys)
        if value is None:
            raise ValueError(
                f"{str(path)!r} line {number}: expected a JSON object with "
                f"{' and '.join(keys)}"
            )
        values.append(value)
    return values


def resume(path: Path) -> list[Trace]:
    """Read the traces of an unfinished output file; none if there is no file.

    Removes an incomplete last line from the file.
    """
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    if lines and (not lines[-1].endswith("\n") or _parsed(lines[-1]) is None):
        path.write_text("".join(lines[:-1]), encoding="utf-8")
    return read_lines(path)


def append(path: Path, traces: Iterable[Trace]) -> None:
    """Append traces to a file, each as soon as it is ready."""
    with path.open("a", encoding="utf-8") as file:
        for trace in traces:
            file.write(json.dumps(trace) + "\n")
            file.flush()


def _parsed(line: str, keys: Sequence[str] = TRACE_KEYS) -> dict[str, Any] | None:
    """Return the JSON object of a line, None if it is not one with these keys."""
    try:
        value = json.loads(line)
    except json.JSONDecodeError:
        return None
    return value if isinstance(value, dict) and set(keys) <= value.keys() else None


def boxed_answer(text: str) -> str | None:
    r"""Return the content of the last \boxed{...} of a text, None if there is none."""
    start = text.rfind(BOXED)
    depth = 1
    for index in range(start + len(BOXED), len(text) if start >= 0 else 0):
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if not depth:
            return text[start + len(BOXED) : index]
    return None


def same_answer(given: str | None, truth: str) -> bool:
    """Return whether two answers agree, apart from notation."""
    return given is not None and _plain(given) == _plain(truth)


def _plain(answer: str) -> str:
    plain = _SILENT.sub("", answer).replace("dfrac", "frac").rstrip(".")
    try:
        return repr(float(plain.replace(",", "")))
    except ValueError:
        return plain


def answer_start(pieces: Sequence[str], prompt_len: int) -> int:
    r"""Find the token where the answer begins.

    It begins after the last "</think>" and the white space that follows; without one,
    at the last "\boxed{"; without either, 64 tokens before the end.

    Args:
        pieces: text of each token, prompt included.

    Returns:
        An index above `prompt_len`, at most the number of tokens.
    """
    text = "".join(pieces[prompt_len:])
    ends = list(_ends(pieces[prompt_len:]))
    index = max(1, len(ends) - ANSWER_TOKENS)
    if (mark := text.rfind(THINK_END)) >= 0:
        index = sum(end < mark + len(THINK_END) for end in ends) + 1
        while index < len(ends) and not pieces[prompt_len + index].strip():
            index += 1
    elif (mark := text.rfind(BOXED)) >= 0:
        index = max(1, sum(end <= mark for end in ends))
    return prompt_len + min(index, len(ends))


def _ends(pieces: Iterable[str]) -> Iterator[int]:
    """Yield the number of characters up to the end of each piece: 2, 5 for ab, cde."""
    end = 0
    for piece in pieces:
        end += len(piece)
        yield end
