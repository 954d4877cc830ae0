"""Which implementation each operation runs: one table, and what a user may demand.

On a CPU an operation runs its twin in C++ where it has one and the package was built
with them, else its PyTorch reference. On a GPU it runs Triton. The environment variable
KVPOLICY_KERNELS demands one implementation; an operation without a CUDA twin runs
Triton where CUDA C++ is demanded, and one without a twin for the CPU its reference. A
demand that this machine cannot meet is refused at start-up.
"""

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
OPERATIONS = (
    *("assign_pages", "best_pages", "compact_pages", "count_in_pages", "credited_mass"),
    *("enter_page_lists", "enter_requests", "fill_next_best", "head_page_tables"),
    *("limit_must_keep", "list_survivors", "must_keep_tokens", "page_bounds"),
    *("page_quota", "page_scores", "page_tables", "paged_cosines", "paged_gates"),
    *("paged_norms", "paged_pair_projections", "paged_projections", "paged_quadratics"),
    *("pick_by_quota", "pooled_usage", "read_survivors", "resize", "save_rows"),
    *("segment_quota", "survivor_moves", "top_k_mask", "until_attention"),
    *("window_usage", "write_survivors", "write_until"),
)
# Beside the reference and the twin in Triton, which all of them have.
IN_CPP = {
    "cuda": ("compact_pages", "page_tables"),
    "cpu": (
        *("compact_pages", "credited_mass", "fill_next_best", "limit_must_keep"),
        *("list_survivors", "must_keep_tokens", "paged_norms", "paged_quadratics"),
        *("pick_by_quota", "pooled_usage", "read_survivors", "resize", "segment_quota"),
        *("survivor_moves", "top_k_mask", "window_usage", "write_survivors"),
    ),
}


def has(name: str, which: str) -> bool:
    """Return whether an operation has an implementation, one of `IMPLEMENTATIONS`."""
    return which not in IN_CPP or name in IN_CPP[which]


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


def implementation_of(name: str, device_type: str) -> str:
    """Return the implementation that an operation runs on a `torch.device.type`.

    What is neither "cpu" nor "cuda" runs the reference.
    """
    if device_type == "cpu":
        is_wanted = has(name, "cpu") and demanded() in (None, "cpu")
        return "cpu" if is_wanted and why_not_in_cpp() is None else "reference"
    if device_type != "cuda":
        return "reference"
    wanted = demanded() or "triton"
    return wanted if has(name, wanted) else "triton"


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
    for name in OPERATIONS:
        names.setdefault(implementation_of(name, device_type), []).append(name)
    if len(names) > 1:
        return "; ".join(
            f"{LABELS[which]} for {', '.join(names[which])}" for which in sorted(names)
        )
    line = f"{LABELS[next(iter(names))]} for all {len(OPERATIONS)} operations"
    if device_type != "cpu" or demanded() == "reference":
        return line
    return f"{line}; {why_not_in_cpp()}"
