"""Builds a policy object from its name and options."""

from collections.abc import Mapping
from typing import Any

from vllm_kvpolicy.policies.admitted import AdmittedPolicy
from vllm_kvpolicy.policies.base import Policy
from vllm_kvpolicy.policies.catalogue.names import parse, resolve_options
from vllm_kvpolicy.policies.compose import ComposedPolicy
from vllm_kvpolicy.policies.selections.quest import Quest


def build(name: str, options: Mapping[str, Any] | None = None) -> Policy:
    """Build the policy `name`.

    Args:
        name: see `catalogue.names`.
        options: `--kv-policy-config` as the user gave it; None is empty.

    Raises:
        ValueError: an unknown name, an unknown option, or a value outside its range.
    """
    info = parse(name)
    resolved = resolve_options(info, options or {})
    if info.whole is not None:
        return info.whole.build(resolved)
    eviction: Any = None
    if info.scorer is not None and info.allocator is not None:
        scorer, allocator = info.scorer.build(resolved), info.allocator.build(resolved)
        eviction = ComposedPolicy(scorer, allocator)
    if info.admission is None:
        return eviction
    return AdmittedPolicy(info.admission.build(resolved), eviction)


def build_selection(
    name: str, options: Mapping[str, Any] | None = None
) -> Quest | None:
    """Build what chooses the pages that queries read, None where they read all.

    Args:
        name: of the policy.
        options: see `build`.

    Raises:
        ValueError: see `build`.
    """
    info = parse(name)
    if info.selection is None:
        return None
    return info.selection.build(resolve_options(info, options or {}))
