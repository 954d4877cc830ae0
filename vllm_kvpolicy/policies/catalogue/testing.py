"""The test policies: names outside the grammar, which drop nothing."""

from pydantic import Field

from vllm_kvpolicy.policies.catalogue.options import Options
from vllm_kvpolicy.policies.catalogue.rows import WordRow


class MovementOptions(Options):
    """Options of the test policies."""

    ragged: bool = Field(
        False, description="also swap pages between all heads and layers"
    )


TEST_POLICIES = {
    "identity": WordRow(
        "vllm_kvpolicy.policies.testing:MovementPolicy",
        "keeps everything, shuffles tokens at each event",
        "test policy, this project",
        options=MovementOptions,
        placement="vllm_kvpolicy.policies.testing:shuffled",
    ),
    "holes": WordRow(
        "vllm_kvpolicy.policies.testing:MovementPolicy",
        "keeps everything, frees pages and takes them again",
        "test policy, this project",
        options=MovementOptions,
        placement="vllm_kvpolicy.policies.testing:exchanged",
    ),
}
