"""Owns ``path``: the way from the start of a graph to a node, against dead ends.

Each line is an edge, in random order; one line gives the start its digit. Every node
has one edge in, so the trace goes back from the node asked for and counts the edges on
the way, modulo 10, as far as the start's digit; the answer is the sum of both. How long
the way is differs, else it could be had from the start's digit alone::

    prompt  de/fi;4/ba;ba/gu;ba/de;?fi
    trace   FI0/DE1/BA2/4+2>6;?FI6
"""

from random import Random

from reasoner.families.sheet import Sheet

SPREAD = 5
"""The way has half of the nodes, up to this many more or fewer."""


def build(rng: Random, lines: int) -> Sheet:
    """Returns a tree of ``lines`` nodes, about half of them on the way."""
    sheet = Sheet(rng, lines)
    names, half = sheet.names, (lines + 1) // 2
    way = rng.randint(max(1, half - SPREAD), min(lines, half + SPREAD))
    start = rng.randrange(10)
    edges = [f"{start}/{names[0]};"]
    for node in range(1, lines):
        source = node - 1 if node < way else rng.randrange(node)
        edges.append(f"{names[source]}/{names[node]};")
    rng.shuffle(edges)
    asked = names[way - 1]
    sheet.prompt += [*edges, f"?{asked}"]
    for steps, name in enumerate(reversed(names[:way])):
        sheet.trace.append(f"{name.upper()}{steps % 10}/")
    sheet.answer = str((start + way - 1) % 10)
    end = f"{asked.upper()}{sheet.answer}"
    sheet.trace.append(f"{start}+{(way - 1) % 10}>{sheet.answer};?{end}")
    return sheet
