"""What happens when an engine is configured: read the policy, refuse, choose classes.

`patch` calls `prepare` before vLLM makes its VllmConfig from the arguments, then
`finish` with the result. Nothing here assigns onto vLLM's classes or modules.
What the words of a policy check before an engine starts is in `Word.check_start` of
`policies.words`.
"""

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

from transformers import PreTrainedConfig
from vllm.logger import init_logger

from vllm_kvpolicy import compat
from vllm_kvpolicy.api import cli
from vllm_kvpolicy.api.engines import server_name
from vllm_kvpolicy.api.evidence import tell_untested
from vllm_kvpolicy.api.guards import machine_refusals, refusals
from vllm_kvpolicy.config import CONFIG_KEY, KVPolicyConfig
from vllm_kvpolicy.config_keys import shown
from vllm_kvpolicy.config_values import ConfigValues
from vllm_kvpolicy.kernels import preferences
from vllm_kvpolicy.observe.shared_files import (
    remove_files_at_exit,
    remove_stale_files_at_exit,
)
from vllm_kvpolicy.observe.trace_files import check_trace
from vllm_kvpolicy.policies.names import ADMISSIONS, OWN_MODELS, models_of
from vllm_kvpolicy.sizes import (
    check_drafts,
    full_layers,
    kv_heads,
    own_block_size,
    settled,
)

logger = init_logger("vllm.kv_policy")

# Key in additional_config, next to CONFIG_KEY, of the name under which all processes of
# a server find its counters. Set only for engines that a command line starts.
ENGINE_KEY = "kv_policy_engine"
NAME = re.compile("[0-9a-f]{32}")
TABLES_PART = 32  # of a device's memory one such part is for the page lists of a step


@contextmanager
def errors(is_command: bool) -> Iterator[None]:
    """Answer a wrong command line as argparse does; Python code gets the ValueError.

    Raises:
        SystemExit: with status 2, in place of a ValueError.
    """
    try:
        yield
    except ValueError as error:
        if not is_command:
            raise
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def read_command_line(engine_args: Any, args: Any) -> None:
    """Put what a command line says about the policy into the engine's arguments.

    Both are changed in the same way: API servers are started with `args`, and each
    makes its own VllmConfig.
    """
    with errors(is_command=True):
        given = cli.given_values(vars(args))
        under = cli.from_environment(compat.policy_variables())
        merged = cli.merge(engine_args.additional_config, given, under)
        _check_name(merged)
    if isinstance(merged, dict) and CONFIG_KEY in merged:
        merged = {ENGINE_KEY: uuid4().hex, **merged}
        engine_args.additional_config = merged
        args.additional_config = merged


def prepare(engine_args: Any) -> KVPolicyConfig | None:
    """Return the policy that arguments ask for, None for none.

    What the user left open and the policy depends on is chosen here, in `engine_args`.

    Raises:
        ValueError: the policy is not valid, or cannot run on this machine.
    """
    with errors(_is_command(engine_args)):
        under = cli.from_environment(compat.policy_variables())
        additional = cli.merge(engine_args.additional_config, {}, under)
        values = additional.get(CONFIG_KEY) if isinstance(additional, dict) else None
        if values is None:
            if under:
                given = compat.policy_variables().items()
                said = ", ".join(k for k, text in given if text and k in cli.VARIABLES)
                logger.warning("%s: without a policy this changes nothing", said)
            return None
        _check_name(additional)
        config = KVPolicyConfig.from_dict(values)
        # Other refusals read a VllmConfig that only a known version is sure to have.
        _refuse(config, machine_refusals())
        _tell_evidence()
        _choose(engine_args)
    return config


def finish(
    engine_args: Any, vllm_config: Any, config: KVPolicyConfig, may_limit: bool = False
) -> None:
    """Refuse what is not supported, name our classes and check the policy's files.

    Args:
        engine_args: EngineArgs that `prepare` has seen, and of which vLLM has made
            `vllm_config`; that is changed.
        config: what `prepare` returned.
        may_limit: the user left open how many requests run at once.

    Raises:
        ValueError: with every reason at once.
    """
    with errors(_is_command(engine_args)):
        _serve_as_full_attention(vllm_config)
        additional = dict(vllm_config.additional_config)
        # Not left in the config: vLLM's compile cache is keyed by what stands there.
        unique = additional.pop(ENGINE_KEY, None) or uuid4().hex
        vllm_config.additional_config = ConfigValues(additional, config)
        compat.serve_latents(vllm_config, engine_args)
        _refuse(config, refusals(vllm_config))
        if compat.is_first_process(engine_args):
            tell_untested(vllm_config)
        compat.align_states(vllm_config)
        if may_limit and config.is_ragged and compat.platform_name() == "cuda":
            _limit_requests(vllm_config)
        config = settled(vllm_config)
        config.validate_block_size(own_block_size(vllm_config))
        check_drafts(config, vllm_config)
        parallel = vllm_config.parallel_config
        own = parallel.worker_cls  # of vLLM's by platform, or ours where it was named
        parallel.worker_cls = compat.WORKER_CLASSES.get(own, own)
        _name_scheduler(vllm_config.scheduler_config, compat.SCHEDULER_CLASSES)
        vllm_config.instance_id = server_name(unique, config)
        remove_stale_files_at_exit()
        if compat.is_first_process(engine_args):
            _tell_chosen(vllm_config, config)
            remove_files_at_exit(vllm_config.instance_id)
            check_files(config, vllm_config)


def finish_stock(vllm_config: Any, is_command: bool) -> None:
    """Refuse what needs a policy; have requests counted where that was asked for."""
    with errors(is_command):
        refuse_plain(vllm_config.model_config)
    if is_counted(vllm_config):
        _name_scheduler(vllm_config.scheduler_config, compat.COUNTING_CLASSES)
        remove_stale_files_at_exit()


def check_files(config: KVPolicyConfig, vllm_config: Any) -> None:
    """Check what each word of the policies reads, and the folder of a trace.

    Raises:
        ValueError: naming key, path, what was found and what is expected.
    """
    # Here and not above: a vLLM that is only installed beside us loads no policy.
    from vllm_kvpolicy.policies.compose import assemble

    checked: list[type] = []
    for policy in config.all_resolved:
        if policy.info.has_own:  # its faults show here and not after loading weights
            assemble(policy)
        for word in policy.info.parts:
            if word not in checked:
                word.check_start(policy.own[word], config, vllm_config)
                checked.append(word)
    _check_deciders(config)
    served = [name.partition("+")[0] for name in config.policies]
    refuse_plain(vllm_config.model_config, served)
    if config.trace_dir is not None:
        check_trace(Path(config.trace_dir))


def refuse_plain(model_config: Any, served: Iterable[str] = ()) -> None:
    """Refuse a model that must not be served without an admission.

    Args:
        served: admissions of the server's policies; none for a plain server.

    Raises:
        ValueError: saying what to add.
    """
    for word in OWN_MODELS:
        if word not in served:
            models_of(word).refuse_plain(model_config)


def missing_architecture(config: Mapping[str, Any]) -> str | None:
    """Return the architecture of a model whose config.json leaves it out.

    vLLM would take one for the model without its output layer, which cannot generate.
    None where no admission knows the model; ValueError for a type that none supports.
    """
    if not config or config.get("architectures"):
        return None
    found = (models_of(word).missing_architecture(config) for word in OWN_MODELS)
    return next(filter(None, found), None)


def config_json(engine_args: Any) -> dict[str, Any]:
    """Return a model's config.json; empty beside a model that is a single file."""
    place = engine_args.hf_config_path or engine_args.model
    if Path(place).is_file():  # a whole model, which must not be read as a config.json
        return {}
    try:  # as the first step of vLLM's own HFConfigParser
        config, _ = PreTrainedConfig.get_config_dict(
            place, revision=engine_args.revision, token=engine_args.hf_token
        )
    except (OSError, ValueError):
        return {}  # vLLM says what is wrong with it
    return config if isinstance(config, dict) else {}


def is_counted(vllm_config: Any) -> bool:
    """Return whether an engine without a policy was asked to count what it holds."""
    scheduler = vllm_config.scheduler_config
    return scheduler.scheduler_cls in compat.COUNTING_CLASSES.values()


def _check_name(additional: Any) -> None:
    """Raise ValueError where a user has written the name of the engine's files.

    The processes of a server hand a name on to each other that the first has made.
    """
    name = additional.get(ENGINE_KEY) if isinstance(additional, dict) else None
    if name is not None and not (isinstance(name, str) and NAME.fullmatch(name)):
        raise ValueError(
            f"additional_config: got {ENGINE_KEY} {shown(name)}, expected it to be "
            "left out, for the server makes this name itself"
        )


def _is_command(engine_args: Any) -> bool:
    additional = engine_args.additional_config
    return isinstance(additional, Mapping) and ENGINE_KEY in additional


def _name_scheduler(scheduler: Any, classes: Mapping[bool, str]) -> None:
    scheduler.scheduler_cls = classes[bool(scheduler.async_scheduling)]


def _choose(engine_args: Any) -> None:
    model, overrides = config_json(engine_args), engine_args.hf_overrides or {}
    if isinstance(overrides, dict) and "architectures" not in overrides:
        missing = missing_architecture(model)
        if missing is not None:
            engine_args.hf_overrides = {**overrides, "architectures": [missing]}
            logger.info("config.json names no architecture, served as %s", missing)
    platform = compat.platform_name()
    if engine_args.block_size is None and not compat.caches_latents(model):
        engine_args.block_size = compat.BLOCK_TOKENS.get(platform)
    chosen = (engine_args.attention_backend, engine_args.attention_config.backend)
    if platform == "cuda" and chosen == (None, None):
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        dtypes = str(engine_args.dtype), engine_args.kv_cache_dtype
        chosen_name = compat.cuda_attention_backend(model, *dtypes)
        engine_args.attention_backend = AttentionBackendEnum[chosen_name]


def _limit_requests(vllm_config: Any) -> None:
    """Let no more requests run than have room for the page lists of their heads.

    In the tables of a step, which graphs read, each layer and KV head of a request has
    a list as long as max_model_len may need. A power of two, and never more than
    before.
    """
    longest = vllm_config.model_config.max_model_len
    pages = -(-longest // own_block_size(vllm_config))
    row = 4 * full_layers(vllm_config) * kv_heads(vllm_config)[0] * pages
    room = compat.device_memory() // TABLES_PART // row
    most = 1 << max(room.bit_length() - 1, 0)
    scheduler = vllm_config.scheduler_config
    if most < scheduler.max_num_seqs:
        logger.info("KV policy: --max-num-seqs %d, for room for page lists", most)
        scheduler.max_num_seqs = most


def _tell_chosen(vllm_config: Any, config: KVPolicyConfig) -> None:
    backend = vllm_config.attention_config.backend
    logger.info(
        "KV policy %s: block size %s, attention backend %s",
        config.policy,
        vllm_config.cache_config.block_size,
        "chosen by the platform" if backend is None else backend.name,
    )
    kernels = preferences.summary(compat.platform_name())
    logger.info("KV policy kernels: %s", kernels)


def _serve_as_full_attention(vllm_config: Any) -> None:
    """Treat sliding windows that no request outgrows as full attention.

    What vLLM does with `--disable-sliding-window`. It would keep every superblock all
    the same: no request is longer than max_model_len.
    """
    window, model = vllm_config.cache_config.sliding_window, vllm_config.model_config
    if window is not None and window >= model.max_model_len:
        vllm_config.cache_config.sliding_window = None
        model.hf_text_config.sliding_window = None


def _tell_evidence() -> None:
    version = compat.vllm_version()
    if compat.minor_release(version) != compat.TESTED_VLLM:
        evidence = compat.release_of(version).evidence
        logger.warning("KV policy: vLLM %s was %s", version, evidence)


def _refuse(config: KVPolicyConfig, reasons: list[str]) -> None:
    if reasons:
        lines = "".join(f"\n  - {reason}" for reason in reasons)
        raise ValueError(
            f"--kv-policy {config.policy} is not supported together with:{lines}"
        )


def _check_deciders(config: KVPolicyConfig) -> None:
    """Raise ValueError where two admissions decide while tokens are computed."""
    policies = (each for each in config.all_resolved if each.decides)
    deciding = {each.info.name.partition("+")[0] for each in policies}
    if len(deciding) > 1:
        always = ", ".join(name for name, word in ADMISSIONS.items() if word.decides)
        raise ValueError(
            f"allow: got {' and '.join(sorted(deciding))}, expected at most one "
            f"admission that decides in the forward pass: {always}, or any with "
            "`exact`"
        )
