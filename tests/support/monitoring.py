"""What the dashboard and the alert rules of docs/monitoring ask Prometheus for."""

import json
import re
from pathlib import Path

import yaml

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "monitoring"
SERIES = re.compile(r"\b(?:vllm:|kvpolicy_)\w+")


def board() -> dict:
    return json.loads((FOLDER / "dashboard.json").read_text())


def board_queries() -> list[str]:
    """Return the queries of all panels and variables of the dashboard."""
    panels = [
        target["expr"] for p in board()["panels"] for target in p.get("targets", ())
    ]
    variables = [v["query"] for v in board()["templating"]["list"]]
    return panels + [query["query"] for query in variables if isinstance(query, dict)]


def rules() -> list[dict]:
    groups = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def series_of(queries: list[str]) -> set[str]:
    """Return the names of the series, of vLLM and of ours, that queries read."""
    return {name for query in queries for name in SERIES.findall(query)}


def all_series() -> set[str]:
    """Return the names of all series that docs/monitoring reads."""
    return series_of(board_queries() + [rule["expr"] for rule in rules()])
