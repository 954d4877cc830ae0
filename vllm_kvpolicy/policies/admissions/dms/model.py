"""Finds out how a model that was trained with DMS decides: the rule of its decisions.

Three kinds of models decide themselves. Released ones (nvidia/Qwen3-8B-DMS-8x) have
`dms_*` keys in their config.json and borrow a channel of the first query head of each
group. Those of Model-Optimizer's recipe have more keys and adapters of their own next
to the model's weights. Third parties put `dms_metadata.json` next to a plain model
whose channel is also borrowed.

Source: Dynamic Memory Sparsification, arXiv 2506.05345, section 3 and appendix B, and
https://github.com/NVIDIA/Model-Optimizer/tree/a2fbac7/experimental/dms. Deviations of
models from the paper are fields of `DmsRule`.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from vllm_kvpolicy.policies.admissions.dms.adapter import DmsAdapter

METADATA_FILE = "dms_metadata.json"
# Of the released models, where their files leave a value out.
WINDOW, SCALE, OFFSET = 512, 100.0, 5.0


@dataclass(frozen=True)
class DmsRule:
    """How decisions are read from a model, and what follows from them.

    A token is dropped once it is more than `window` tokens old if its logit is above 0.

    Args:
        is_borrowed: logits are a channel of the model's queries, which attention must
            not see; otherwise adapters compute them.
        window: tokens before itself that a query always sees.
        scale: factor on a borrowed channel or an adapter's output.
        offset: taken from that.
        channel: which channel is borrowed; counts from the end if negative.
        shift: the token at t decides on the one at t - shift, 0 or 1.
        zero_after_rope: the borrowed channel is also set to 0 after the rotation.
        per_layer: the first KV head decides for all of its layer.
    """

    is_borrowed: bool = True
    window: int = WINDOW
    scale: float = SCALE
    offset: float = OFFSET
    channel: int = -1
    shift: int = 1
    zero_after_rope: bool = True
    per_layer: bool = False

    def with_options(self, options: Mapping[str, Any]) -> "DmsRule":
        """Return the rule with the values that the user overrides.

        Args:
            options: resolved options of the policy.
        """
        names = ("window", "channel", "shift", "zero_after_rope")
        given = {name: options[f"dms_{name}"] for name in names}
        return replace(self, **{k: v for k, v in given.items() if v is not None})


def rule_of_config(config: Any) -> DmsRule | None:
    """Return the rule of a model's configuration, None where it has no `dms_*` keys.

    Keys that are missing mean what they do to the released models.

    Args:
        config: the model's text configuration, any object with its keys as attributes.
    """
    keys = {key: value for key, value in vars(config).items() if value is not None}
    if not any(key.startswith("dms_") for key in keys):
        return None
    offset = float(keys.get("dms_initial_alpha_offset", OFFSET))
    if keys.get("dms_disable_eviction", False):
        offset = math.inf
    return DmsRule(
        is_borrowed=not keys.get("dms_separate_alpha", False),
        window=int(keys.get("dms_window_size", WINDOW)),
        scale=float(keys.get("dms_alpha_scale", SCALE)),
        offset=offset,
        per_layer=keys.get("dms_alpha_per", "head") == "layer",
    )


def model_folder(model_config: Any) -> Path:
    """Return the folder of a model whose weights are on this machine.

    Args:
        model_config: vLLM's ModelConfig; its model is a folder, or a name on the hub
            that has been downloaded.
    """
    if Path(model_config.model).is_dir():
        return Path(model_config.model)
    name, revision = model_config.model, model_config.revision
    return Path(snapshot_download(name, revision=revision, local_files_only=True))


def _metadata_file(model: str, revision: str | None) -> Path | None:
    """Return the path of a model's `dms_metadata.json`; uses the local cache only."""
    path = Path(model) / METADATA_FILE
    if path.is_file():
        return path
    if Path(model).is_dir() or model.count("/") > 1:
        return None
    try:
        found = try_to_load_from_cache(model, METADATA_FILE, revision=revision)
    except HFValidationError:  # vLLM knows more kinds of names than the hub
        return None
    return Path(found) if isinstance(found, str) else None


def rule_of_metadata(model: str, revision: str | None = None) -> DmsRule | None:
    """Return the rule of a model's `dms_metadata.json`, None if there is none.

    Args:
        model: a folder, or a name on the hub, of which the file has been downloaded.
        revision: of a name on the hub.

    Raises:
        ValueError: the file is not one that can be read.
    """
    path = _metadata_file(model, revision)
    if path is None:
        return None
    try:
        values = json.loads(path.read_text())
        return DmsRule(
            window=int(values.get("window_size", WINDOW)),
            scale=float(values.get("alpha_scale", SCALE)),
            offset=float(values.get("alpha_offset", OFFSET)),
            shift=0,
            zero_after_rope=False,
        )
    except (ValueError, TypeError, AttributeError, OSError) as error:
        raise ValueError(
            f"{path}: got {error}, expected JSON with window_size, alpha_scale and "
            "alpha_offset"
        ) from None


def rule_of_model(model_config: Any) -> DmsRule | None:
    """Return the rule that a model itself names, None where it has none.

    Args:
        model_config: vLLM's ModelConfig.

    Raises:
        ValueError: a broken `dms_metadata.json`.
    """
    found = rule_of_config(model_config.hf_text_config)
    return found or rule_of_metadata(model_config.model, model_config.revision)


def rule_of_adapter(adapter: DmsAdapter) -> DmsRule:
    """Return the rule of an adapter that is served with a plain model."""
    return DmsRule(
        is_borrowed=False,
        window=adapter.window,
        scale=adapter.alpha_scale,
        offset=adapter.alpha_offset,
        shift=adapter.shift,
    )


def rule_for(
    model_config: Any, adapter: DmsAdapter | None, options: Mapping[str, Any]
) -> DmsRule:
    """Return how decisions are read from a model, and what follows from them.

    Args:
        model_config: vLLM's ModelConfig.
        adapter: decides in place of the model.
        options: resolved options of the policy, which have the last word.

    Raises:
        ValueError: the model has no decisions, and there is no adapter; or it borrows
            a channel, and there is one.
    """
    rule = rule_of_model(model_config)
    if adapter is not None:
        if rule is not None and rule.is_borrowed:
            raise ValueError(
                f"dms_adapter: {model_config.model} already decides in a channel of "
                "its queries; leave the adapter out"
            )
        rule = rule_of_adapter(adapter)
    if rule is None:
        raise ValueError(
            f"dms: {model_config.model} has no dms_* keys in config.json and no "
            f"{METADATA_FILE} on this machine, so it makes no decisions of its own; "
            "set dms_adapter to an adapter from `python -m training dms`"
        )
    return rule.with_options(options)
