"""Fixtures shared by all tests: the tiny model, and no network."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# The tiny model is faster with one thread than with two, and engines of one test run
# must not all be bound to the first core. What looks up n-grams would set the number
# of threads anew, for PyTorch as well.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("NUMBA_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
for name in [name for name in os.environ if name.startswith("VLLM_KV_")]:
    del os.environ[name]  # a policy of whoever runs the tests
# They hold tests, which files of tests import.
TWINS = ("moves", "page_tables", "reductions", "selection", "stages", "window_usage")
pytest.register_assert_rewrite(*(f"support.twins_of_{each}" for each in TWINS))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option of `make test-all`, and the one that renews pictures."""
    parser.addoption(
        "--every-name",
        action="store_true",
        help="sweep over every policy of the package, and simulate for longer",
    )
    parser.addoption(
        "--screenshots",
        action="store_true",
        help="write what tests/serve/test_live_pictures.py sees into docs/figures",
    )
    parser.addoption(
        "--tally", type=Path, help="write the seconds of each test file into this file"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Say how far tests sweep, tally seconds, hide what PyTorch may not use."""
    from support import sweeps
    from support.tally import Tally

    sweeps.every_name = config.getoption("--every-name")
    if os.environ.get("ATEN_CPU_CAPABILITY") == "avx2":
        hide_avx512()
    if path := config.getoption("--tally"):
        config.pluginmanager.register(Tally(path))


def hide_avx512() -> None:
    """Let vLLM, which asks for what the CPU has, find what PyTorch is told to use.

    It loads its library and chooses its kernels by that. Servers of tests, processes of
    their own, ask again.
    """
    import torch

    for name in ("avx512", "avx512_bf16", "amx_tile", "amx_fp16"):
        setattr(torch.cpu, f"_is_{name}_supported", lambda: False)


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Leave out slow tests, thin sweeps; the dearest files come first."""
    from support import sweeps
    from support.collection import rank

    everything = list(items)
    is_chosen = sweeps.every_name or any("::" in word for word in config.args)
    if not is_chosen:
        quick = [item for item in items if not item.get_closest_marker("slow")]
        items[:] = sweeps.thinned(quick, Path(__file__).parent)
        left_out = set(everything) - set(items)
        config.hook.pytest_deselected(items=[i for i in everything if i in left_out])
    items.sort(key=lambda item: rank(item.path))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Share tests among processes file by file."""
    from support.collection import ByFile

    return ByFile(config, log)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 folder: 2 layers, 4 query heads, 2 KV heads, head size 32."""
    from support.tiny_model import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("tiny_model"))


@pytest.fixture(scope="session")
def policy_config(tiny_model: Path):
    """A finished VllmConfig of the tiny model with `--kv-policy ams-tova`."""
    from support.engine_configs import engine_args

    policy = {"policy": "ams-tova", "budget": 128, "interval": 64}
    additional = {"kv_policy": policy}
    return engine_args(tiny_model, additional_config=additional).create_engine_config()


@pytest.fixture(scope="session")
def model_config(tiny_model: Path):
    """The tiny model's configuration for schedulers; no weight is loaded."""
    from vllm.config import ModelConfig

    return ModelConfig(
        model=str(tiny_model), skip_tokenizer_init=True, dtype="float32", seed=0
    )


@pytest.fixture
def policy_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Iterator[pytest.LogCaptureFixture]:
    """What the plugin logs, also after vLLM has stopped its loggers' propagation.

    vLLM sets up logging, and takes handlers away, at a process's first configuration.
    """
    from vllm.config import LoggingConfig
    from vllm.logger import configure_logging_if_needed

    configure_logging_if_needed(LoggingConfig())
    logger = logging.getLogger("vllm.kv_policy")
    monkeypatch.setattr(logger, "propagate", False)
    logger.addHandler(caplog.handler)
    with caplog.at_level("INFO", logger.name):
        yield caplog
    logger.removeHandler(caplog.handler)
