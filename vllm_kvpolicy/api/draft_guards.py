"""What speculative decoding is refused with: rows of the table in `guards`."""

from typing import Any

from vllm_kvpolicy import compat
from vllm_kvpolicy.api.refusal import Refusal, listed
from vllm_kvpolicy.config import server_config

# Methods of vLLM that draft from tokens alone, of the request and of earlier answers.
# Tests run both; those of suffix trees are skipped where the package `arctic-inference`
# is not installed. Others have layers of their own, whose keys and values no policy
# looks after.
METHODS = ("ngram", "suffix")


def _speculates(config: Any) -> bool:
    return config.speculative_config is not None


def _measures(config: Any) -> bool:
    server = server_config(config)
    return server is not None and any(
        each.info.measures_tokens for each in server.all_resolved
    )


_MEASURING = listed("measures_tokens")

DRAFT_REFUSALS = (
    Refusal(
        "speculative decoding by other methods than n-grams and suffix trees (MTP, "
        "EAGLE, draft models and others)",
        lambda config: (
            _speculates(config) and config.speculative_config.method not in METHODS
        ),
        'set "method": "ngram" or "suffix" in --speculative-config, or leave it out',
    ),
    Refusal(
        "speculative decoding on GPUs",
        lambda config: _speculates(config) and compat.platform_name() != "cpu",
        "leave out --speculative-config: no GPU has run a policy with drafts",
    ),
    Refusal(
        f"speculative decoding with what measures each token ({_MEASURING})",
        lambda config: _speculates(config) and _measures(config),
        "leave out --speculative-config: a token is compared with the one before it, "
        "which may be a draft that is rejected",
    ),
)
