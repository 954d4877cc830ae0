"""Owns ``hops``: chains of look-ups through shuffled facts, most of them distractors.

A fact gives a name a digit or the value of another name. Chains are up to a quarter as
deep as the problem has facts; four names start at each depth. Every name that has no
digit of its own is asked for, in random order, and one of them again at the end::

    prompt  ba:de;7:ba;de:fi;?fi?de!fi
    trace   ?FI:DE:BA:7>FI7?DE:BA:7>DE7!FI7
"""

from random import Random

from reasoner.families.sheet import Sheet

WIDTH = 4
"""Names at each depth."""


def build(rng: Random, lines: int) -> Sheet:
    """Returns ``lines`` facts, at least one of which names another."""
    sheet = Sheet(rng, max(2, lines))
    names = sheet.names
    width = min(WIDTH, len(names) // 2)
    chains: list[str] = []
    facts: list[str] = []
    for node, name in enumerate(names):
        if node < width:
            source = end = str(rng.randrange(10))
        else:
            level = node // width * width
            below = rng.randrange(level - width, level)
            source, end = names[below], chains[below]
        facts.append(f"{source}:{name};")
        chains.append(f"{name.upper()}:{end}")
    rng.shuffle(facts)
    sheet.prompt += facts
    asked = rng.sample(range(width, len(names)), len(names) - width)
    for node in asked:
        name, chain = names[node], chains[node]
        sheet.prompt.append(f"?{name}")
        sheet.trace.append(f"?{chain}>{name.upper()}{chain[-1]}")
    last = rng.choice(asked)
    sheet.answer = chains[last][-1]
    sheet.prompt.append(f"!{names[last]}")
    sheet.trace.append(f"!{names[last].upper()}{sheet.answer}")
    return sheet
