"""docker/compose.yaml and the Helm values against the files and names that they use.

Nothing is started: there may be no daemon and no cluster.
"""

from pathlib import Path
from posixpath import dirname, join

import yaml

from support.vllm_flags import serve_flags

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"
COMPOSE = yaml.safe_load((DOCKER / "compose.yaml").read_text())
SERVICES = COMPOSE["services"]
CHART = yaml.safe_load((DOCKER / "production-stack.yaml").read_text())


def mounts(service: str) -> dict[str, Path]:
    """Return the files that a service sees: place in the container -> file here."""
    found = {}
    for volume in SERVICES[service].get("volumes", ()):
        source, target, mode = volume.split(":")
        assert mode == "ro" and source.startswith("."), volume
        found[target] = (DOCKER / source).resolve()
    return found


def port(service: str) -> int:
    """Return the port of a service, published as such on this machine alone."""
    (published,) = SERVICES[service]["ports"]
    address, outside, inside = published.split(":")
    assert address == "127.0.0.1" and outside == inside
    return int(inside)


def read(path: str | Path) -> dict:
    return yaml.safe_load((DOCKER / path).read_text())


def test_prometheus_scrapes_the_server_and_finds_its_rules() -> None:
    (config,) = [p for p in mounts("prometheus") if p.endswith("/prometheus.yml")]
    file = read(mounts("prometheus")[config])
    (scrape,) = file["scrape_configs"]
    assert scrape["static_configs"] == [{"targets": [f"vllm:{port('vllm')}"]}]
    rules = {join(dirname(config), name) for name in file["rule_files"]}
    assert rules | {config} == set(mounts("prometheus"))


def test_grafana_finds_prometheus_and_the_board() -> None:
    (source,) = read("grafana/datasource.yml")["datasources"]
    assert source["url"] == f"http://prometheus:{port('prometheus')}"
    (provider,) = read("grafana/dashboards.yml")["providers"]
    environment = SERVICES["grafana"]["environment"]
    home = environment["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert dirname(home) == provider["options"]["path"]
    assert mounts("grafana")[home] == ROOT / "docs" / "monitoring" / "dashboard.json"
    provisioned = {p for p in mounts("grafana") if "/provisioning/" in p}
    assert {Path(p).name for p in provisioned} == {"datasource.yml", "dashboards.yml"}


# -- docker/production-stack.yaml ------------------------------------------------------


def test_vllm_takes_what_the_chart_passes() -> None:
    """The words that the chart's template of a deployment writes for these values."""
    (model,) = CHART["servingEngineSpec"]["modelSpec"]
    config = model["vllmConfig"]
    words = [model["modelURL"], "--host", "0.0.0.0", "--port", "8000"]
    words += ["--enable-prefix-caching"] if config["enablePrefixCaching"] else []
    words += ["--max-model-len", str(config["maxModelLen"]), *config["extraArgs"]]
    args = serve_flags(words)
    assert args.enable_prefix_caching
    assert (args.kv_policy, args.kv_budget) == ("ams-expected", 2048)
    assert "lmcacheConfig" not in model, "a policy refuses KV connectors"


def test_pods_of_the_chart_are_scraped_where_vllm_answers() -> None:
    (model,) = CHART["servingEngineSpec"]["modelSpec"]
    scrape = read("../docs/monitoring/prometheus.yml")["scrape_configs"][0]
    assert model["podAnnotations"] == {
        "prometheus.io/scrape": "true",
        "prometheus.io/path": scrape["metrics_path"],
        "prometheus.io/port": str(port("vllm")),
    }
    assert all(isinstance(word, str) for word in model["vllmConfig"]["extraArgs"])
