"""Names the policies that a refusal at start-up concerns."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from vllm_kvpolicy.policies.base import Needs, Policy


@contextmanager
def refused_for(
    policies: Mapping[str, Policy], reads: Callable[[Needs], Any] = lambda needs: True
) -> Iterator[None]:
    """Add to a refusal the names of the policies that it concerns.

    Args:
        policies: by name.
        reads: returns from its needs whether a policy is concerned; by default all are.

    Raises:
        ValueError: the one raised inside, with the policies' names.
    """
    try:
        yield
    except ValueError as error:
        names = [name for name, policy in policies.items() if reads(policy.needs)]
        raise ValueError(
            f"kv_policy: {', '.join(names)} cannot run on this model: {error}; "
            "choose other policies, also in `allow`"
        ) from None
