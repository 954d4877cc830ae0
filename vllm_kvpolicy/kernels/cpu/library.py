"""Loads the package's C++ kernels for CPUs, `torch.ops.vllm_kvpolicy_cpu`."""

from vllm_kvpolicy.kernels.native.library import PACKAGE, load_library

LIBRARY = PACKAGE / "_C_cpu.abi3.so"
SOURCES = PACKAGE.parent / "csrc" / "cpu"
HOW = (
    "install g++ and run `KVPOLICY_CPU=1 pip install --no-build-isolation --no-deps .` "
    "in a checkout, or `python setup.py build_ext --inplace` to use the checkout itself"
)


def load() -> None:
    """Register the operators, once.

    Raises:
        ImportError: the kernels were not built, or do not fit this PyTorch.
    """
    load_library(LIBRARY, SOURCES, "CPU kernels", HOW)
