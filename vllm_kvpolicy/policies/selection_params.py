"""Options of the selections.

Called by policies.catalogue. A leaf like the registry.
Process: any
"""

from vllm_kvpolicy.policies.params import Param

QUEST_PARAMS = (
    Param(
        "quest_budget",
        "int",
        1024,
        "tokens per KV head that a step reads, local tokens included",
        1,
    ),
)
