"""Which implementation each operation runs: one table, and what a user may demand.

On a CPU an operation runs its twin in C++ where it has one and the package was built
with them, else its PyTorch reference. On a GPU it runs Triton, unless committed timings
of both say that CUDA C++ is faster. The environment variable KVPOLICY_KERNELS demands
one implementation; an operation without a CUDA twin
runs Triton where CUDA C++ is demanded, and one without a twin for the CPU its
reference. A demand that this machine cannot meet is refused at start-up.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

from vllm_kvpolicy import compat
from vllm_kvpolicy.kernels.libraries import CPU, CUDA

IMPLEMENTATIONS = ("reference", "triton", "cuda", "cpu")
LABELS = {
    "reference": "PyTorch",
    "triton": "Triton",
    "cuda": "CUDA C++",
    "cpu": "C++",
}


@dataclass(frozen=True)
class Preference:
    """What one operation has in addition to its reference and its twin in Triton.

    Args:
        in_cuda: there is a twin in CUDA C++.
        in_cpu: there is a twin in C++ for the CPU.
    """

    in_cuda: bool = False
    in_cpu: bool = False

    def has(self, which: str) -> bool:
        """Return whether there is such an implementation, one of `IMPLEMENTATIONS`."""
        return {"cuda": self.in_cuda, "cpu": self.in_cpu}.get(which, True)


TABLE: Mapping[str, Preference] = {
    "assign_pages": Preference(),
    "best_pages": Preference(),
    "compact_pages": Preference(in_cuda=True, in_cpu=True),
    "count_in_pages": Preference(),
    "credited_mass": Preference(in_cpu=True),
    "enter_page_lists": Preference(),
    "enter_requests": Preference(),
    "fill_next_best": Preference(in_cpu=True),
    "head_page_tables": Preference(),
    "limit_must_keep": Preference(in_cpu=True),
    "list_survivors": Preference(in_cpu=True),
    "must_keep_tokens": Preference(in_cpu=True),
    "page_bounds": Preference(),
    "page_quota": Preference(),
    "page_scores": Preference(),
    "page_tables": Preference(in_cuda=True),
    "paged_cosines": Preference(),
    "paged_gates": Preference(),
    "paged_norms": Preference(in_cpu=True),
    "paged_pair_projections": Preference(),
    "paged_projections": Preference(),
    "paged_quadratics": Preference(in_cpu=True),
    "pick_by_quota": Preference(in_cpu=True),
    "pooled_usage": Preference(in_cpu=True),
    "read_survivors": Preference(in_cpu=True),
    "resize": Preference(in_cpu=True),
    "save_rows": Preference(),
    "segment_quota": Preference(in_cpu=True),
    "survivor_moves": Preference(in_cpu=True),
    "top_k_mask": Preference(in_cpu=True),
    "until_attention": Preference(),
    "window_usage": Preference(in_cpu=True),
    "write_survivors": Preference(in_cpu=True),
    "write_until": Preference(),
}


@cache
def demanded() -> str | None:
    """Return what KVPOLICY_KERNELS demands, None where it is not set; read once.

    Raises:
        ValueError: it is not one of `IMPLEMENTATIONS`.
    """
    value = compat.demanded_kernels()
    if value is not None and value not in IMPLEMENTATIONS:
        raise ValueError(
            f"{compat.KERNELS_VARIABLE}: got {value!r}, expected one of "
            f"{', '.join(IMPLEMENTATIONS)}, or leave it unset"
        )
    return value


@cache
def why_not_in_cpp() -> str | None:
    """Return why twins in C++ cannot run on this CPU, None where they can."""
    try:
        CPU.load()
    except ImportError as error:
        return str(error)
    return None


def implementation_of(preference: Preference, device_type: str) -> str:
    """Return the implementation that an operation runs on a `torch.device.type`.

    What is neither "cpu" nor "cuda" runs the reference.
    """
    if device_type == "cpu":
        is_wanted = preference.in_cpu and demanded() in (None, "cpu")
        return "cpu" if is_wanted and why_not_in_cpp() is None else "reference"
    if device_type != "cuda":
        return "reference"
    wanted = demanded() or "triton"
    return wanted if preference.has(wanted) else "triton"


def unmet_demands(platform: str) -> list[str]:
    """Return why KVPOLICY_KERNELS cannot be followed on vLLM's platform of this name.

    At most one sentence.
    """
    try:
        wanted = demanded()
    except ValueError as error:
        return [str(error)]
    label = f"{compat.KERNELS_VARIABLE}={wanted}"
    if wanted in (None, "reference"):
        return []
    needed, device = ("cpu", "a CPU") if wanted == "cpu" else ("cuda", "an NVIDIA GPU")
    if platform != needed:
        return [
            f"{label}: needs {device}, got platform {platform}; unset it or set "
            f"it to reference"
        ]
    try:
        _load(wanted)
    except ImportError as error:
        return [f"{label}: {error}"]
    return []


def _load(which: str | None) -> None:
    """Raise ImportError where an implementation for this device is not installed."""
    if which != "triton":
        (CUDA if which == "cuda" else CPU).load()
    elif find_spec("triton") is None:
        raise ImportError("Triton is not installed; install it or unset the variable")


def summary(device_type: str) -> str:
    """Return one line that says which implementation each operation runs.

    Example: "CUDA C++ for compact_pages, page_tables; Triton for window_usage".
    On a CPU without the twins in C++ it also says why.
    """
    names: dict[str, list[str]] = {}
    for name, preference in TABLE.items():
        names.setdefault(implementation_of(preference, device_type), []).append(name)
    if len(names) > 1:
        return "; ".join(
            f"{LABELS[which]} for {', '.join(names[which])}" for which in sorted(names)
        )
    line = f"{LABELS[next(iter(names))]} for all {len(TABLE)} operations"
    if device_type != "cpu" or demanded() == "reference":
        return line
    return f"{line}; {why_not_in_cpp()}"
