"""The libraries of kernels in C++ and in CUDA C++: where they are and whether they fit.

setup.py, which builds them, reads this file where there is no PyTorch to import.
"""

from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parents[1]
_loaded: set[Path] = set()


@dataclass
class Library:
    """A library of operators, which a wheel or a checkout may have.

    Attributes:
        name: of its operators in `torch.ops`.
        sources: folder of its sources in a checkout; an installed package has none.
        kernels: what it holds, such as "CUDA kernels".
        how: how to build it, as the end of a sentence.
    """

    name: str
    path: Path
    sources: Path
    kernels: str
    how: str

    def load(self) -> Any:
        """Register the operators, once per process, and return them.

        Raises:
            ImportError: it was not built, or of other sources than the checkout has,
                or does not fit this PyTorch.
        """
        import torch

        if self.path not in _loaded:
            self._check()
            try:
                torch.ops.load_library(str(self.path))
            except OSError as error:
                reason = error.__cause__ or error
                raise ImportError(
                    f"cannot load the {self.kernels} of vllm-kvpolicy: {reason}"
                ) from error
            _loaded.add(self.path)
        return getattr(torch.ops, self.name)

    def _check(self) -> None:
        if not self.path.exists():
            raise ImportError(
                f"vllm-kvpolicy was built without {self.kernels}; to build them, "
                f"{self.how}"
            )
        if not self.sources.is_dir():
            return
        if digest_of(self.sources).encode() not in self.path.read_bytes():
            raise ImportError(
                f"the {self.kernels} of vllm-kvpolicy are of other sources than this "
                f"checkout; to build them again, {self.how}"
            )


def digest_of(folder: Path) -> str:
    """Return a digest of a library's sources.

    Args:
        folder: of the sources; a folder `cpu` in it is that of another library.
    """
    found = sha256()
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if path.is_file() and name.parts[0] != "cpu":
            found.update(f"{name.as_posix()}\n".encode() + path.read_bytes())
    return f"sources {found.hexdigest()}"


CPU = Library(
    "vllm_kvpolicy_cpu",
    PACKAGE / "_C_cpu.abi3.so",
    PACKAGE.parent / "csrc" / "cpu",
    "CPU kernels",
    "install g++ and run `KVPOLICY_CPU=1 pip install --no-build-isolation --no-deps .` "
    "in a checkout, or `python setup.py build_ext --inplace` to use the checkout "
    "itself",
)
CUDA = Library(
    "vllm_kvpolicy",
    PACKAGE / "_C.abi3.so",
    PACKAGE.parent / "csrc",
    "CUDA kernels",
    "install nvcc and PyTorch for CUDA and run `KVPOLICY_CUDA=1 pip install "
    "--no-build-isolation --no-deps .` in a checkout",
)
