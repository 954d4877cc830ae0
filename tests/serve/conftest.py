"""The server that the tests of this folder share where they ask for nothing else."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.servers.servers import serving
from support.servers.shared_server import SETTINGS


@pytest.fixture(scope="session")
def shared_server(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """URL of a server with the live page that reads its flags from a YAML file."""
    folder = tmp_path_factory.mktemp("serve")
    settings = folder / "serve.yaml"
    settings.write_text(f"{SETTINGS}\nkv-live: true\n")
    with serving(tiny_model, ["--config", str(settings)], folder) as url:
        yield url
