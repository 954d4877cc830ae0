"""The selections: a row and a model of options for each.

A selection says which of the kept pages a decoding step reads.
"""

from pydantic import Field

from vllm_kvpolicy.policies.catalogue.options import MOST_TOKENS, Options
from vllm_kvpolicy.policies.catalogue.rows import WordRow


class QuestOptions(Options):
    """Options of `quest`."""

    quest_budget: int = Field(
        1024,
        ge=1,
        le=MOST_TOKENS,
        description="tokens per KV head that a decoding step reads, including local "
        "tokens",
    )


SELECTIONS = {
    "quest": WordRow(
        "vllm_kvpolicy.policies.selections.quest:Quest",
        "each generated token reads only the pages whose keys may match its query best",
        "Quest, arXiv 2406.10774",
        options=QuestOptions,
        ragged=True,
    ),
}
# The policy of a name that is a selection alone.
KEEP_ALL = WordRow(
    "vllm_kvpolicy.policies.keep_all:KeepAll",
    "keeps everything",
    "this project",
)
