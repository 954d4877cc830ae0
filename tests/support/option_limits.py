"""The numbers that options accept."""

import math

from pydantic.fields import FieldInfo

from vllm_kvpolicy.policies.options import bound_of


def limits_of(field: FieldInfo) -> tuple[float, float]:
    """Return the smallest and the largest valid value of a number."""
    low, high, end = (bound_of(field.metadata, name) for name in ("ge", "le", "lt"))
    if high is None and end is not None:
        high = math.nextafter(end, -math.inf)
    assert low is not None and high is not None  # every number has both
    return low, high
