"""Window attention read from the pages, without storing the weights of all queries.

Source: csrc/cpu/window_usage.cpp says how. Deviations from the reference, all of them
rounding: the order in which dot products are added up, the exponential, and a product
with one over the sum of weights in place of a quotient. A row's results depend on
nothing but its own queries and keys.
"""

import torch

from vllm_kvpolicy.kernels.cpu.library import load
from vllm_kvpolicy.kernels.nucleus import nucleus_counts
from vllm_kvpolicy.kernels.paged import PagedTokens
from vllm_kvpolicy.kernels.window_logits import effective_window
from vllm_kvpolicy.kernels.window_usage import WindowUsage, check_shapes, check_sinks


def window_usage(
    queries: torch.Tensor,
    keys: PagedTokens,
    lengths: torch.Tensor,
    scale: float,
    mass: float | None = None,
    sink_logits: torch.Tensor | None = None,
) -> WindowUsage:
    """Causal softmax of the newest queries over the cached keys, reduced over them.

    Args: as for `kernels.window_usage.window_usage_ref`. Queries and pools may have any
        strides and are not copied.

    Returns:
        Usage per query head, in float32, to rounding that of the reference. Nuclei are
        the reference's.

    Raises:
        ImportError: the kernels were not built.
        ValueError: shapes that do not fit together, or nuclei beside sinks.
    """
    load()
    check_shapes(queries, keys)
    check_sinks(queries, sink_logits, mass)
    shape = (*queries.shape[:3], keys.num_tokens)
    mean, last = (queries.new_zeros(shape, dtype=torch.float32) for _ in range(2))
    for layers, pool in keys.by_pool():
        found, rows = (mean, last, queries), (keys.pages, lengths)
        torch.ops.vllm_kvpolicy_cpu.window_usage(
            *(each[:, layers] for each in found),
            pool,
            *(each[:, layers] for each in rows),
            scale,
            None if sink_logits is None else sink_logits[layers].contiguous(),
        )
    counts: tuple[torch.Tensor, ...] = ()
    if mass is not None:
        counts = (nucleus_counts(queries, keys.dense, lengths, scale, mass),)
    window = effective_window(lengths, queries.shape[3])
    return WindowUsage(mean, last, lengths, window, *counts)
