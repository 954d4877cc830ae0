"""The routes on an application like vLLM's, which measures its requests."""

import tempfile
from types import SimpleNamespace

import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from prometheus_fastapi_instrumentator import Instrumentator
from starlette.testclient import TestClient

from vllm_kvpolicy.api import live


@pytest.mark.parametrize("is_live", [True, False])
def test_streams_are_no_long_requests(is_live, tmp_path, monkeypatch):
    """Answers are 401 here: what counts is which paths are measured."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    app, registry = FastAPI(), CollectorRegistry()
    instrumentator = Instrumentator(excluded_handlers=["/health"], registry=registry)
    instrumentator.add().instrument(app)
    config = {"policy": "tova", "live": is_live}
    app.state.args = SimpleNamespace(
        additional_config={"kv_policy": config}, api_key=["right"]
    )
    live.attach(app)
    client = TestClient(app)
    expected = 401 if is_live else 404
    for path in ("/kv_policy", "/kv_policy/requests", "/kv_policy/stream"):
        assert client.get(path).status_code == expected
    measured = {
        sample.labels["handler"]
        for metric in registry.collect()
        for sample in metric.samples
        if "handler" in sample.labels
    }
    routes = {"/kv_policy", "/kv_policy/requests"}
    assert measured == (routes if is_live else {"none"})
