"""Reads and writes what is remembered of each survivor, for several values at once.

Source: csrc/cpu/survivors.cpp. Deviations: none.
"""

import torch

from vllm_kvpolicy.kernels.cpu.library import load


def read_survivors(
    survivors: torch.Tensor,
    local: torch.Tensor,
    which: torch.Tensor,
    index: torch.Tensor,
    first: torch.Tensor,
    global_blocks: torch.Tensor,
    num_tokens: int,
) -> torch.Tensor:
    """Read values of the tokens that requests hold, zero where none was written.

    Exact; see `kernels.survivor_values.read_survivors_ref`.

    Raises:
        ImportError: the kernels were not built.
        RuntimeError: a tensor has another dtype, size or device.
    """
    load()
    found = survivors.new_empty(len(which), len(index), local.shape[2], num_tokens)
    first = first.long().contiguous()
    rows = which, index, first, global_blocks
    torch.ops.vllm_kvpolicy_cpu.read_survivors(found, survivors, local, *rows)
    return found


def write_survivors(
    survivors: torch.Tensor,
    local: torch.Tensor,
    which: torch.Tensor,
    index: torch.Tensor,
    values: torch.Tensor,
    sources: torch.Tensor,
    num_pages: torch.Tensor,
    num_local: torch.Tensor,
    global_blocks: torch.Tensor,
) -> None:
    """Replace the values of requests' survivors, on the superblocks they moved to.

    Exact; see `kernels.survivor_values.write_survivors_ref`.

    Raises:
        ImportError: the kernels were not built.
        RuntimeError: a tensor has another dtype, size or device.
    """
    load()
    torch.ops.vllm_kvpolicy_cpu.write_survivors(
        survivors,
        local,
        which,
        index,
        values.contiguous(),
        sources.contiguous(),
        num_pages.contiguous(),
        num_local,
        global_blocks,
    )
