"""Owns ``count``: counters that go up by one, modulo 10, at each event.

Counters are single consonants and start at a stated digit. An event names the counter's
new value, so old values stay around as distractors::

    prompt  3>k;0>t;+k>ba;+t>de;+k>fi;?k
    trace   3>K3;0>T0;+K4>BA4;+T1>DE1;+K5>FI5;?K5

The question asks for the last value of one counter that went up.
"""

from random import Random

from reasoner.families.sheet import CONSONANTS, Sheet


def build(rng: Random, lines: int) -> Sheet:
    """Returns ``lines`` events on a fifth as many counters, 2 to 20."""
    sheet = Sheet(rng, lines)
    counters = rng.sample(CONSONANTS, min(len(CONSONANTS), max(2, lines // 5)))
    state = {letter: rng.randrange(10) for letter in counters}
    for letter, value in state.items():
        sheet.prompt.append(f"{value}>{letter};")
        sheet.trace.append(f"{value}>{letter.upper()}{value};")
    moved = [rng.choice(counters) for _ in range(lines)]
    for letter in moved:
        state[letter] = (state[letter] + 1) % 10
        value = state[letter]
        sheet.define(f"+{letter}", f"+{letter.upper()}{value}", value)
    asked = rng.choice(moved)
    sheet.prompt.append(f"?{asked}")
    sheet.trace.append(f"?{asked.upper()}{state[asked]}")
    sheet.answer = str(state[asked])
    return sheet
