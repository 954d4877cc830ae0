"""An event that a test plays: the first of a request with two heads."""

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
