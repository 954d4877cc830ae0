"""Events that a test plays: the first two of a request with two heads."""

from dataclasses import replace

from vllm_kvpolicy.protocol import CompactEvent

BLOCK = 2
# One layer, two heads that hold 7 tokens: three full pages and one local token.
FIRST = CompactEvent(
    request_id="r0",
    serial=0,
    policy="ams-tova",
    ordinal=0,
    position=7,
    frontier_blocks=3,
    budget=3,
    sinks=1,
    prompt_tokens=6,
    num_global=0,
    source_blocks=(1, 2, 3),
    dest_blocks=(1,),
    local_blocks=(4,),
)
SECOND = replace(
    FIRST,
    serial=1,
    ordinal=1,
    position=11,
    frontier_blocks=5,
    num_global=1,
    source_blocks=(1, 4, 5),
    local_blocks=(6,),
)
