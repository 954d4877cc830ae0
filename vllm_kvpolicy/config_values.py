"""What vLLM's configuration of an engine holds of its policy."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from vllm_kvpolicy.config import CONFIG_KEY, KVPolicyConfig


class ConfigValues(Mapping[str, Any]):
    """`VllmConfig.additional_config` of an engine with a policy.

    vLLM keys its compile cache by all values of a dict, and would compile a model anew
    for each budget. Of anything else it asks for a hash, and that of these values
    leaves out what the compiled model does not depend on, once a worker has told.

    Args:
        values: JSON, the plain form of the policy under `CONFIG_KEY`.
        policy: what they say, where somebody has read them already.
    """

    def __init__(
        self, values: Mapping[str, Any], policy: KVPolicyConfig | None = None
    ) -> None:
        self._values = dict(values)
        self._graph: tuple[str, ...] | None = None
        self._budget: int | None = None
        if policy is not None:
            self._values[CONFIG_KEY] = policy.to_dict()
            self.policy = policy

    @cached_property
    def policy(self) -> KVPolicyConfig:
        """What the values under `CONFIG_KEY` say, with the budget that was set."""
        config = KVPolicyConfig.from_dict(self._values[CONFIG_KEY])
        return config if self._budget is None else config.with_budget(self._budget)

    def set_budget(self, tokens: int) -> None:
        """Set what a budget of AUTO stands for, here and in copies made from now on."""
        self._budget = tokens
        self.policy = self.policy.with_budget(tokens)

    def __getstate__(self) -> dict[str, Any]:
        """Return what other processes get: each makes its own `policy`."""
        return {key: value for key, value in vars(self).items() if key != "policy"}

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return repr(self._values)

    def set_graph(self, parts: Sequence[str]) -> None:
        """Tell what policies have put into the model's forward pass.

        One line per part, whatever the policy and its numbers; see
        `worker.worker.traced_parts`.
        """
        self._graph = tuple(parts)

    def compute_hash(self) -> str:
        """Return what vLLM's key of compiled models has of these values.

        All of them, until `set_graph` has been called; from then on its parts in place
        of the policy's values.
        """
        graph = {} if self._graph is None else {CONFIG_KEY: self._graph}
        text = json.dumps({**self._values, **graph}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def server_config(vllm_config: Any) -> KVPolicyConfig | None:
    """Return the policy that an engine runs with, or None; one object per process."""
    additional = vllm_config.additional_config
    if isinstance(additional, ConfigValues):
        return additional.policy
    values = additional.get(CONFIG_KEY) if isinstance(additional, Mapping) else None
    return None if values is None else KVPolicyConfig.from_dict(values)


def own_config(vllm_config: Any) -> KVPolicyConfig:
    config = server_config(vllm_config)
    if config is None:
        raise ValueError("got a VllmConfig without a policy, expected one with it")
    return config
