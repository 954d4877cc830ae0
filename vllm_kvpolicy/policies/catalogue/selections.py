"""Options of the selections."""

from vllm_kvpolicy.policies.catalogue.options import Param

QUEST_PARAMS = (
    Param(
        "quest_budget",
        "int",
        1024,
        "tokens per KV head that a step reads, local tokens included",
        1,
    ),
)
