"""Owns ``path``: the way from the start of a graph to a node, against dead ends.

Each line is an edge, in random order; one line gives the start its digit. Every node
has one edge in, so the trace goes back from the node asked for to the start, then
forward along the nodes it found, one more at each step, modulo 10. How long the way is
differs, else the answer could be had from the start's digit alone::

    prompt  de/fi;4/ba;ba/gu;ba/de;?fi
    trace   FI/DE/BA/4;4>BA4;BA4>DE5;DE5>FI6;?FI6

Called by the table of families. Pure Python.
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
    sheet.prompt += [*edges, f"?{names[way - 1]}"]
    upper = [name.upper() for name in names[:way]]
    sheet.trace.append("/".join(reversed(upper)) + f"/{start};")
    before = str(start)
    for step, name in enumerate(upper):
        now = f"{name}{(start + step) % 10}"
        sheet.trace.append(f"{before}>{now};")
        before = now
    sheet.trace.append(f"?{before}")
    sheet.answer = before[-1]
    return sheet
