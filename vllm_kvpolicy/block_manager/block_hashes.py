"""Hashes of superblocks where the next token decides about the last one of each."""

from collections.abc import Callable
from typing import Any

from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    generate_block_hash_extra_keys,
    hash_block_tokens,
)
from vllm.v1.request import Request


def lookahead_hasher(cache_config: Any) -> Callable[[Request], list[BlockHash]] | None:
    """Return a hasher that counts the token after a superblock as part of it.

    With DMS, a token decides whether the token before it is kept. The decision about
    the last token of a superblock is stored with the superblock, so that only requests
    that go on with the same token may share it. vLLM 0.33 has the same for drafters
    (`num_hash_lookahead_tokens`).

    Example: superblocks of 4 tokens. The prompts `abcdefgh x` and `abcdefgh y` share
    `abcd`, which `e` follows in both, but not `efgh`.

    Args:
        cache_config: vLLM's, with block size and hash function.

    Returns:
        What a request calls for its new hashes; its last superblock has one when the
        token after it is known. None without prefix caching.
    """
    if not cache_config.enable_prefix_caching:
        return None
    block_size = cache_config.block_size
    hash_function = get_hash_fn_by_name(cache_config.prefix_caching_hash_algo)

    def new_hashes(request: Request) -> list[BlockHash]:
        known, tokens = request.block_hashes, request.all_token_ids
        before = known[-1] if known else None
        hashes = []
        last = request.num_tokens - block_size  # a token has to follow the superblock
        for start in range(len(known) * block_size, last, block_size):
            end = start + block_size
            keys, _ = generate_block_hash_extra_keys(request, start, end, 0)
            keys = (*(keys or ()), tokens[end])
            before = hash_block_tokens(hash_function, before, tokens[start:end], keys)
            hashes.append(before)
        return hashes

    return new_hashes
