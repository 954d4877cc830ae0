"""Kernels on a GPU, test_*_gpu.py: imported everywhere, skipped where there is none."""

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU."""
    if not torch.cuda.is_available():
        for item in items:
            if item.path.name.endswith("_gpu.py"):
                item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU"))
