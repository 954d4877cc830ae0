"""What the catalogue holds: one row per word of the grammar."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from vllm_kvpolicy.policies.catalogue.options import Options


@dataclass(frozen=True)
class WordRow:
    """One word of the grammar: an admission, a scorer, an allocator or a selection.

    Args:
        path: "module:name" of what builds the part: called with the word's options as
            keyword arguments.
        summary: half a line for help texts.
        source: where the method is published.
        options: the keys of `--kv-policy-config` that the part reads.
        window: queries that the part reads: a number, or the option that holds it.
        ragged: heads end up with different numbers of tokens; an admission must set it.
        dynamic: it may keep less than the budget: always, or where an option has this
            value; an admission always may.
        protect_prompt: prompt tokens are kept unless the user says otherwise.
        decides: it always decides while tokens are computed, not at events.
        decides_later: a token decides about the token before it.
        measures_tokens: its events read what was measured when each token was computed,
            so that a request takes nothing from the prefix cache.
        weighs_itself: it computes attention of its own from queries, which leaves out
            learned sinks.
        rotates: it reads how the model rotates queries and keys.
        presets: option values by the name of a preset.
        refuses: words that it is not combined with, and why.
        placement: "module:function" that chooses the superblocks of survivors; None for
            the request's oldest, so that survivors move towards the front.
        startup: "module:class" of its `policies.startup.Startup`, None for the plain
            one.
        architectures: "module:class" of model classes that vLLM must know to load the
            models that it serves, by the name in their config.json. Only words with
            such models are asked, by their `startup`, about models without a policy.
    """

    path: str
    summary: str
    source: str
    options: type[Options] = Options
    window: int | str = 0
    ragged: bool = False
    dynamic: bool | tuple[str, Any] = False
    protect_prompt: bool = False
    decides: bool = False
    decides_later: bool = False
    measures_tokens: bool = False
    weighs_itself: bool = False
    rotates: bool = False
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    refuses: Mapping[str, str] = field(default_factory=dict)
    placement: str | None = None
    startup: str | None = None
    architectures: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_fitted(self) -> bool:
        """Whether it belongs to one model's weights: by a file, or by their training.

        What words check before a start are those files and models.
        """
        return self.startup is not None

    def read(self, values: Mapping[str, Any]) -> Any:
        """Return the word's own options.

        Args:
            values: of a whole policy; a key that is missing takes its default.

        Raises:
            ValueError: a value outside its range.
        """
        own = {key: values[key] for key in self.options.model_fields if key in values}
        return self.options(**own)

    def build(self, values: Mapping[str, Any]) -> Any:
        """Build the part, see `read`; imports torch."""
        return load(self.path)(**dict(self.read(values)))

    def is_dynamic(self, values: Mapping[str, Any]) -> bool:
        """Return whether the part may keep less than the budget.

        Args:
            values: resolved options of a whole policy.
        """
        if isinstance(self.dynamic, bool):
            return self.dynamic
        key, value = self.dynamic
        return values.get(key) == value

    def window_tokens(self, values: Mapping[str, Any]) -> int:
        """Return how many queries the part reads.

        Args:
            values: options of a whole policy; a missing one takes its default.
        """
        if isinstance(self.window, int):
            return self.window
        return values.get(self.window, self.options.model_fields[self.window].default)


def load(path: str) -> Any:
    """Import what "module:name" names."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)
