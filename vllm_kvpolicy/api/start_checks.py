"""Checks the files and folders that a configuration names, before an engine starts.

Each word of a policy checks its own; see `policies.words.Word.check_start`.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from vllm_kvpolicy.config import KVPolicyConfig
from vllm_kvpolicy.policies.names import ADMISSIONS, OWN_MODELS, models_of
from vllm_kvpolicy.trace.files import check_trace


def check_files(config: KVPolicyConfig, vllm_config: Any) -> None:
    """Check what each word of the policies reads, and the folder of a trace.

    Args:
        config: the server's policy.
        vllm_config: the finished VllmConfig, for the model's shape.

    Raises:
        ValueError: naming key, path, what was found and what is expected.
    """
    checked: list[type] = []
    for policy in config.all_resolved:
        for word in policy.info.parts:
            if word not in checked:
                word.check_start(word.read(policy.options), config, vllm_config)
                checked.append(word)
    _check_deciders(config)
    served = [name.partition("+")[0] for name in config.policies]
    refuse_plain(vllm_config.model_config, served)
    if config.trace_dir is not None:
        check_trace(Path(config.trace_dir))


def refuse_plain(model_config: Any, served: Iterable[str] = ()) -> None:
    """Refuse a model that must not be served without an admission.

    Args:
        model_config: vLLM's ModelConfig.
        served: admissions of the server's policies; none for a plain server.

    Raises:
        ValueError: saying what to add.
    """
    for word in OWN_MODELS:
        if word not in served:
            models_of(word).refuse_plain(model_config)


def missing_architecture(engine_args: Any) -> str | None:
    """Return the architecture of a model whose config.json leaves it out.

    vLLM would take one for the model without its output layer, which cannot generate.

    Args:
        engine_args: EngineArgs; its model is a folder or a name on the hub.

    Returns:
        None where no admission knows the model, or there is no config.json,
        as beside a model that is a single file.

    Raises:
        ValueError: a word knows the model but does not support its type.
    """
    place = engine_args.hf_config_path or engine_args.model
    if Path(place).is_file():  # a whole model, which must not be read as a config.json
        return None
    try:  # as the first step of vLLM's own HFConfigParser
        config, _ = PreTrainedConfig.get_config_dict(
            place,
            revision=engine_args.revision,
            token=engine_args.hf_token,
        )
    except (OSError, ValueError):
        return None  # vLLM says what is wrong with it
    if not isinstance(config, dict) or config.get("architectures"):
        return None
    found = (models_of(word).missing_architecture(config) for word in OWN_MODELS)
    return next(filter(None, found), None)


def _check_deciders(config: KVPolicyConfig) -> None:
    """Raise ValueError where two admissions decide while tokens are computed."""
    deciding = {
        policy.info.name.partition("+")[0]
        for policy in config.all_resolved
        if policy.decides
    }
    if len(deciding) > 1:
        always = ", ".join(name for name, word in ADMISSIONS.items() if word.decides)
        raise ValueError(
            f"allow: got {' and '.join(sorted(deciding))}, expected at most one "
            f"admission that decides in the forward pass: {always}, or any with "
            "`exact`"
        )
