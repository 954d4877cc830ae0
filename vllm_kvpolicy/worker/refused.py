"""Says which policies a refusal at start-up is about."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from vllm_kvpolicy.policies.base import Needs, Policy


@contextmanager
def refused_for(
    policies: Mapping[str, Policy], reads: Callable[[Needs], Any] = lambda needs: True
) -> Iterator[None]:
    """Say which policies a refusal inside is about.

    Args:
        policies: by name.
        reads: whether a policy is concerned, from its needs; by default all are.

    Raises:
        ValueError: what was raised inside, with the policies' names.
    """
    try:
        yield
    except ValueError as error:
        names = [name for name, policy in policies.items() if reads(policy.needs)]
        raise ValueError(
            f"kv_policy: {', '.join(names)} cannot run on this model: {error}; choose "
            "other policies, in `allow` too"
        ) from None
