"""Draws the figures of a trace with matplotlib."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_kvpolicy.observe.measures import kept_by_bin, kept_mask
from vllm_kvpolicy.observe.trace_files import EventRecord

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH = 10.0  # inches
PANEL_HEIGHT = 1.5  # inches per head
MAX_COLUMNS = 1000  # positions of a map are averaged into at most this many
MAX_NUMBERS = 128  # heat maps of more heads have colours without numbers
CURVE_COLUMNS = 4
CURVE_HEIGHT = 1.7  # inches
RETENTION_TITLE = "Tokens kept by relative position, mean over heads and events"
OTHERS = "; grey: the other policies"
MASS_DECADES = 6  # shown below the largest mass


def new_figure(
    rows: int, height: float, columns: int = 1, width: float = WIDTH
) -> tuple["Figure", Any]:
    """Return a figure and its panels [rows * columns], row by row; sizes are in inches.

    All panels share the x axis; with several columns they share the y axis, too.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("plots need matplotlib: pip install matplotlib") from None
    figure = Figure(figsize=(width, height), layout="constrained")
    panels = figure.subplots(
        rows, columns, sharex=True, sharey=columns > 1, squeeze=False
    )
    return figure, panels.flatten()


def _by_head(layer: int, heads: int, title: str) -> tuple["Figure", Any]:
    """Return a figure with a panel per KV head of a layer."""
    figure, panels = new_figure(heads, PANEL_HEIGHT * heads + 1.2)
    # Clients choose their requests' names; a dollar sign would begin a formula.
    title = title.replace("$", r"\$")
    figure.suptitle(f"{title}, layer {layer}")
    for head, panel in enumerate(panels):
        panel.set_title(f"KV head {head}", fontsize="small", loc="left")
    return figure, panels


def retention_map(events: Sequence[EventRecord], layer: int, title: str) -> "Figure":
    """Draw which tokens each head of a layer keeps, by event of one request."""
    last = events[-1].position
    columns = min(last, MAX_COLUMNS)
    heads = events[0].held.shape[1]
    share = np.full((heads, len(events), columns), np.nan)
    for row, event in enumerate(events):
        kept, tokens = kept_by_bin(kept_mask(event)[layer], columns, last)
        share[:, row, tokens > 0] = kept[:, tokens > 0] / tokens[tokens > 0]
    figure, panels = _by_head(layer, heads, title)
    image: Any = None
    for head, panel in enumerate(panels):
        image = panel.imshow(
            share[head],
            extent=(0, last, len(events) - 0.5, -0.5),
            vmin=0,
            vmax=1,
            cmap="Blues",
            aspect="auto",
            interpolation="nearest",
        )
        panel.set_facecolor("lightgrey")
        panel.set_ylabel("event (ordinal)")
        panel.vlines(
            [event.frontier for event in events],
            np.arange(len(events)) - 0.5,
            np.arange(len(events)) + 0.5,
            colors="red",
            label="frontier (local tokens, all kept, are to its right)",
        )
    panels[-1].set_xlabel("position of the token (grey: not computed yet)")
    panels[0].legend(loc="upper right", fontsize="x-small")
    figure.colorbar(image, ax=list(panels), label="share of tokens kept")
    return figure


def segment_map(event: EventRecord, layer: int, title: str) -> "Figure":
    """Draw `mass`, `segments` and kept shares of each head, from an event's notes."""
    heads = event.held.shape[1]
    figure, panels = _by_head(layer, heads, title)
    mesh: Any = None
    for head, panel in enumerate(panels):
        held = event.held[layer, head]
        length = np.count_nonzero(held >= 0)
        mass = event.notes["mass"][layer, head, :length]
        segments = event.notes["segments"][layer, head]
        segments = segments[segments[:, 1] > segments[:, 0]]
        chosen = np.isin(held[:length], event.selected[layer, head])
        shares = [chosen[start:end].mean() for start, end in segments]
        top = mass.max()
        bottom = max(mass.min() / 2, top / 10**MASS_DECADES)
        edges = np.append(segments[:, 0], length)
        mesh = panel.pcolormesh(
            edges, (bottom, 2 * top), [shares], vmin=0, vmax=1, cmap="summer_r"
        )
        panel.vlines(edges, bottom, 2 * top, colors="dimgrey", linewidths=0.8)
        panel.stairs(mass.clip(bottom), np.arange(length + 1), color="black")
        panel.set_yscale("log")
        panel.set_ylim(bottom, 2 * top)
        panel.set_ylabel("mass per token")
    panels[-1].set_xlabel("token held before the event, oldest first")
    figure.colorbar(mesh, ax=list(panels), label="share of the segment chosen")
    return figure


def head_map(values: np.ndarray, title: str, unit: str) -> "Figure":
    """Draw one number per layer and KV head, of values [L, H]."""
    layers, heads = values.shape
    figure, (panel,) = new_figure(1, 0.35 * layers + 2)
    image = panel.imshow(values, aspect="auto", cmap="viridis")
    panel.set_title(title)
    panel.set_xlabel("KV head")
    panel.set_ylabel("layer")
    panel.set_xticks(range(heads))
    panel.yaxis.get_major_locator().set_params(integer=True)
    middle = (values.min() + values.max()) / 2
    if values.size <= MAX_NUMBERS:
        for (layer, head), value in np.ndenumerate(values):
            colour = "white" if value <= middle else "black"
            panel.text(
                head, layer, f"{value:.3g}", ha="center", va="center", color=colour
            )
    figure.colorbar(image, ax=panel, label=unit)
    return figure


def retention_curves(
    retention: Mapping[str, Sequence[float]], title: str | None = RETENTION_TITLE
) -> "Figure":
    """Draw the share of tokens kept by relative position, a panel per policy.

    Args:
        retention: by policy, shares in bins of equal width, oldest first; in each panel
            the other policies are grey.
    """
    columns = min(CURVE_COLUMNS, len(retention))
    rows = -(-len(retention) // columns)
    figure, panels = new_figure(rows, CURVE_HEIGHT * rows + 1, columns)
    edges = {name: np.linspace(0, 1, len(row) + 1) for name, row in retention.items()}
    for index, (panel, policy) in enumerate(zip(panels, retention, strict=False)):
        for other, shares in retention.items():
            panel.stairs(shares, edges[other], color="lightgrey")
        own = retention[policy], edges[policy]
        panel.stairs(*own, color="C0", linewidth=2, label=policy)
        panel.set_title(policy, fontsize="medium", loc="left")
        panel.tick_params(labelbottom=index + columns >= len(retention))
    for panel in panels[len(retention) :]:
        panel.remove()
    panels[0].set(xlim=(0, 1), ylim=(0, 1.02), xticks=(0, 0.5, 1), yticks=(0, 0.5, 1))
    if title is not None:
        figure.suptitle(title + OTHERS * (len(retention) > 1))
    figure.supxlabel("position of the token / position of the event")
    figure.supylabel("share of tokens kept")
    return figure
