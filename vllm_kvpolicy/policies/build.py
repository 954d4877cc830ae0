"""Builds a policy object from its name and options."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from vllm_kvpolicy.policies.admitted import AdmittedPolicy
from vllm_kvpolicy.policies.base import Policy
from vllm_kvpolicy.policies.catalogue.names import parse, resolve_options
from vllm_kvpolicy.policies.compose import ComposedPolicy
from vllm_kvpolicy.policies.selections.quest import Quest


def build(name: str, options: Mapping[str, Any] | None = None) -> Policy:
    """Build the policy `name`.

    Args:
        name: see `registry.names`.
        options: `--kv-policy-config` as the user gave it; None is empty.

    Raises:
        ValueError: an unknown name, an unknown option, or a value outside its range.
    """
    info = parse(name)
    resolved = resolve_options(info, options or {})
    if info.path is not None:
        return _load(info.path).from_options(resolved)
    eviction: Any = None
    if info.scorer is not None:
        parts = info.scorer, info.allocator
        eviction = ComposedPolicy(*(_load(p).from_options(resolved) for p in parts))
    if info.admission is None:
        return eviction
    return AdmittedPolicy(_load(info.admission).from_options(resolved), eviction)


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
    return _load(info.selection).from_options(resolve_options(info, options or {}))


def _load(path: str | None) -> Any:
    """Import the class that "module:class" names."""
    module, _, attribute = str(path).partition(":")
    return getattr(import_module(module), attribute)
