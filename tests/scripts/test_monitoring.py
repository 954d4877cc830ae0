"""The dashboard, the scrape file and the alert rules against our table of series.

tests/serve/test_http.py looks for each series, vLLM's too, on a running server.
"""

import re

import yaml

from support import monitoring
from vllm_kvpolicy.observe.metrics import SERIES

EXPOSED = {
    f"kvpolicy_{series.name}{'_total' * (series.kind == 'counter')}": series.kind
    for series in SERIES
}
PAGE = (monitoring.FOLDER / "README.md").read_text()


def ours(names: set[str]) -> set[str]:
    return {name for name in names if name.startswith("kvpolicy_")}


def test_every_series_of_ours_exists() -> None:
    assert ours(monitoring.all_series()) - set(EXPOSED) == set()


def test_the_board_shows_every_series_of_ours() -> None:
    shown = monitoring.series_of(monitoring.board_queries())
    assert set(EXPOSED) - shown == set()
    assert len(shown) > len(EXPOSED), "vLLM's own stand beside them"


def test_counters_are_read_over_time_and_gauges_as_they_are() -> None:
    queries = monitoring.board_queries() + [r["expr"] for r in monitoring.rules()]
    for name in ours(monitoring.all_series()):
        over_time = re.compile(
            rf"(?:rate|increase|min_over_time)\({name}(?:{{[^}}]*}})?\["
        )
        for query in queries:
            uses = len(re.findall(rf"\b{name}\b", query))
            if uses and EXPOSED[name] == "counter" and "unless" not in query:
                assert len(over_time.findall(query)) == uses, query
            elif EXPOSED[name] == "gauge":
                assert f"rate({name}" not in query, query


def test_the_scrape_file_loads_the_rules_and_reads_what_vllm_serves() -> None:
    file = yaml.safe_load((monitoring.FOLDER / "prometheus.yml").read_text())
    (rules,) = file["rule_files"]
    assert (monitoring.FOLDER / rules).is_file()
    (scrape,) = file["scrape_configs"]
    assert scrape["metrics_path"] == "/metrics"
    jobs = {job for rule in monitoring.rules() for job in _jobs(rule["expr"])}
    assert jobs == {scrape["job_name"]}


def _jobs(expression: str) -> list[str]:
    return re.findall(r'job="(\w+)"', expression)


def test_no_alert_divides_by_zero() -> None:
    """Over no step at all a ratio is infinite, which is above every threshold."""
    divisions = 0
    for rule in monitoring.rules():
        for divisor in re.findall(r"/ (rate\([^)]*\))", rule["expr"]):
            divisions += 1
            assert f"and {divisor} > 0" in rule["expr"], rule["alert"]
    assert divisions > 0


def test_every_alert_is_explained() -> None:
    names = [rule["alert"] for rule in monitoring.rules()]
    assert names == re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)
    assert all(rule["annotations"]["summary"] for rule in monitoring.rules())
    assert {rule["labels"]["severity"] for rule in monitoring.rules()} <= {
        *("critical", "warning", "info")
    }
