"""What makes a figure of the report readable by itself, and what its panels show."""

from itertools import combinations
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg


def check_readable(figure: Any) -> None:
    """Check title, caption and labels, and that nothing overlaps or is cut off."""
    title, caption = figure.texts[-2:]
    assert title.get_text() and "\n" not in title.get_text()
    assert caption.get_text().startswith("Setting: ")
    assert caption.get_text().rstrip().endswith(".")
    assert figure.get_supxlabel() or any(panel.get_xlabel() for panel in figure.axes)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    figure.set_layout_engine("none")  # it stays as it is: laid out once
    renderer = canvas.get_renderer()
    above = {"title": title, "caption": caption}
    above |= {f"legend {index}": one for index, one in enumerate(figure.legends)}
    blocks = {name: one.get_window_extent(renderer) for name, one in above.items()}
    panels = [panel.get_tightbbox(renderer) for panel in figure.axes]
    for name, block in blocks.items():
        for panel in panels:
            assert block.y0 >= panel.y1 - 1, f"{name} lies over a panel"
    for one, other in combinations(blocks, 2):
        assert not blocks[one].overlaps(blocks[other]), f"{one} lies over {other}"
    for block in (*blocks.values(), *panels):
        assert block.x0 >= -1 and block.x1 <= figure.bbox.x1 + 1, "cut off at a side"
        assert block.y0 >= -1 and block.y1 <= figure.bbox.y1 + 1, "cut off"


def panel_lines(figure: Any) -> list[dict]:
    """Return the named lines of each panel: label -> x and y."""
    return [
        {
            line.get_label(): (list(line.get_xdata()), list(line.get_ydata()))
            for line in panel.get_lines()
            if not str(line.get_label()).startswith("_")
        }
        for panel in figure.axes
    ]
