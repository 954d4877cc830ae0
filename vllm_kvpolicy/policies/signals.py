"""Signals: numbers that the worker measures at every token while it is computed.

Imported by policies.base; measured by worker.captures.token_signals.
"""

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal


@dataclass(frozen=True)
class TokenSignal:
    """One number per token, averaged over some layers of what each of them shows.

    Args:
        kind: "hidden", how far the layer's output moved since the token before; "key"
            or "value", variance over channels of the cached vector, mean over heads.
        first: first layer, counted from 0, or as a fraction of the model's depth.
        last: last layer, included, as `first`; None for the model's last.
    """

    kind: Literal["hidden", "key", "value"]
    first: int | Fraction = 0
    last: int | Fraction | None = None

    def layers(self, num_layers: int) -> range:
        """Return the layers to measure in a model of `num_layers`.

        Raises:
            ValueError: the model has no such layers.
        """
        last = num_layers - 1 if self.last is None else self.last
        first, last = (
            int(end * num_layers) if isinstance(end, Fraction) else end
            for end in (self.first, last)
        )
        if not 0 <= first <= last < num_layers:
            raise ValueError(
                f"layers of a signal: got {first} to {last}, expected 0 <= first <= "
                f"last <= {num_layers - 1}"
            )
        return range(first, last + 1)
