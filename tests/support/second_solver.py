"""Owns the second solver: answers from prompts alone, another way for each family.

Shares no code with the generators, and computes otherwise: addition and multiplication
through whole integers, paths by breadth-first search, hops by substitution to a fixed
point, counters by counting occurrences.
"""

import re
from collections import Counter, deque


def solve(family: str, prompt: str) -> str:
    """Returns the answer of a prompt in template 0."""
    return SOLVERS[family](prompt)


def _program(prompt: str) -> str:
    values: dict[str, int] = {}
    answer = ""
    for line in re.findall(r"[^;?]+;|\?[a-z]{2}", prompt):
        if line.startswith("?"):
            answer = str(values[line[1:]])
            continue
        expression, name = line.rstrip(";").split(">")
        terms = [values[t] if t in values else int(t) for t in expression.split("-")]
        assert name not in values, "a name was stored twice"
        values[name] = (terms[0] - sum(terms[1:])) % 10
    return answer


def _digit_asked(prompt: str, number: int, names: list[str]) -> str:
    assert len(set(names)) == len(names)
    asked = prompt.rpartition("?")[2]
    return str(number)[::-1].ljust(len(names), "0")[names.index(asked)]


def _whole(digits: list[str]) -> int:
    return int("".join(reversed(digits)))


def _add(prompt: str) -> str:
    columns = re.findall(r"(\d)\+(\d)>([a-z]{2});", prompt)
    left, right, names = (list(part) for part in zip(*columns, strict=True))
    return _digit_asked(prompt, _whole(left) + _whole(right), names)


def _mul(prompt: str) -> str:
    factor = re.match(r"(\d)>\*;", prompt)
    assert factor
    columns = re.findall(r"(\d)\*>([a-z]{2});", prompt)
    digits, names = (list(part) for part in zip(*columns, strict=True))
    return _digit_asked(prompt, _whole(digits) * int(factor[1]), names)


def _count(prompt: str) -> str:
    body, _, asked = prompt.rpartition("?")
    starts = {name: int(d) for d, name in re.findall(r"(\d)>([a-z]);", body)}
    moves = Counter(re.findall(r"\+([a-z])>[a-z]{2};", body))
    return str((starts[asked] + moves[asked]) % 10)


def _path(prompt: str) -> str:
    body, _, goal = prompt.rpartition("?")
    lines = re.findall(r"([a-z]{2}|\d)/([a-z]{2});", body)
    ((digit, start),) = [line for line in lines if line[0].isdigit()]
    queue, steps = deque([start]), {start: 0}
    while queue:
        here = queue.popleft()
        for source, target in lines:
            if source == here:
                assert target not in steps, "two ways to one node"
                steps[target] = steps[here] + 1
                queue.append(target)
    return str((int(digit) + steps[goal]) % 10)


def _hops(prompt: str) -> str:
    body, _, asked = prompt.rpartition("!")
    facts = re.findall(r"([a-z]{2}|\d):([a-z]{2});", body)
    assert len({name for _, name in facts}) == len(facts), "a name has two facts"
    values = {name: source for source, name in facts}
    while any(not value.isdigit() for value in values.values()):
        values = {name: values.get(value, value) for name, value in values.items()}
    return values[asked]


def _needle(prompt: str) -> str:
    asked = prompt.rpartition("?")[2]
    found = re.findall(rf";(\d)>{asked};", prompt)
    assert len(found) == 1
    return found[0]


SOLVERS = {
    "recall": _program,
    "copy": _program,
    "hot": _program,
    "sub": _program,
    "add": _add,
    "mul": _mul,
    "count": _count,
    "path": _path,
    "hops": _hops,
    "needle": _needle,
}
