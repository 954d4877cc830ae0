"""Patterns of DuoAttention for tests."""

import json
from collections.abc import Sequence
from pathlib import Path


def write_pattern(
    folder: Path, use: Sequence[Sequence[float]], sinks: int, recent: int
) -> Path:
    """Write a pattern as its authors publish them; return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = ["\t".join(f"{number:.18e}" for number in row) for row in use]
    (folder / "full_attention_heads.tsv").write_text("\n".join(lines) + "\n")
    config = {"sink_size": sinks, "recent_size": recent, "lr": 0.02}
    (folder / "config.json").write_text(json.dumps(config))
    return folder
