"""What a VllmConfig carries of a policy, and what of it a compiled model depends on."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vllm_kvpolicy.config import CONFIG_KEY


class ConfigValues(Mapping[str, Any]):
    """`VllmConfig.additional_config` of an engine with a policy.

    vLLM keys its compile cache by all values of a dict, and would compile a model anew
    for each budget. Of anything else it asks for a hash, and that of these values
    leaves out what the compiled model does not depend on, once a worker has told.

    Args:
        values: the plain form of the policy under `CONFIG_KEY`, and what else the user
            put into `additional_config`; JSON throughout.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = dict(values)
        self._graph: tuple[str, ...] | None = None

    def __getitem__(self, key: str) -> Any:
        """Return a value."""
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the keys."""
        return iter(self._values)

    def __len__(self) -> int:
        """Return the number of values."""
        return len(self._values)

    def __repr__(self) -> str:
        """Return the values as a dict is written."""
        return repr(self._values)

    def set_graph(self, parts: Sequence[str]) -> None:
        """Tell what policies have put into the model's forward pass.

        Args:
            parts: one line each, whatever the policy and its numbers; see
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
