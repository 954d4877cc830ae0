"""Words of policies, built as the package builds them."""

from typing import Any

from vllm_kvpolicy.policies.words import Word


def built(word: type[Word], **options: Any) -> Any:
    """Return a word with these options, and defaults for the others."""
    return word.build(word.Options(**options))
