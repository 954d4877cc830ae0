"""Loads the package's CUDA kernels, `torch.ops.vllm_kvpolicy`."""

from vllm_kvpolicy.kernels.native.library import PACKAGE, load_library

LIBRARY = PACKAGE / "_C.abi3.so"
SOURCES = PACKAGE.parent / "csrc"
HOW = (
    "install nvcc and PyTorch for CUDA and run `KVPOLICY_CUDA=1 pip install "
    "--no-build-isolation --no-deps .` in a checkout"
)


def load() -> None:
    """Register the operators, once.

    Raises:
        ImportError: the kernels were not built, or do not fit this PyTorch.
    """
    load_library(LIBRARY, SOURCES, "CUDA kernels", HOW)
