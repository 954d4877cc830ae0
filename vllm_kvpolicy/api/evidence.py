"""Says at start what is served though no test has run it on this device.

There are three states of a feature on a device: tested, untested and refused. Untested
features are served, and a line at start names the command that checks each of them on
this very machine. Who has run it sees the line no more: what passed is remembered in
the user's cache folder, by device and by the versions of what it relied on.
"""

import json
import os
from dataclasses import dataclass
from typing import Any

from vllm.logger import init_logger

from vllm_kvpolicy import compat
from vllm_kvpolicy.api import guards

logger = init_logger("vllm.kv_policy")
FILE = "verified.json"
RELIED_ON = ("vllm-kvpolicy", "vllm", "torch", "triton", "flashinfer-python")


@dataclass(frozen=True)
class Feature:
    """Something that a server may use.

    Args:
        name: as `vllm-kvpolicy verify --feature` takes it, where it has a trial.
        what: as a reader of vLLM's documentation knows it.
    """

    name: str
    what: str
    applies: guards.Question
    has_trial: bool = True


FEATURES = (
    Feature(
        "card",
        "GPUs other than NVIDIA's Hopper (compute capability 9.0)",
        lambda config: compat.gpu_capability() != (9, 0),
    ),
    Feature("fp8", "FP8 KV caches", guards.is_float8),
    Feature(
        "windows",
        "sliding-window layers",
        guards.all_of(guards.mixes_windows, lambda c: not guards.has_two_sizes(c)),
    ),
    Feature("heads", "heads of two sizes (Gemma 4)", guards.has_two_sizes),
    Feature("sinks", "learned sinks", guards.has_sinks),
    Feature(
        "states", "layers with a state (Mamba, gated delta nets)", guards.has_states
    ),
    Feature("latents", "latent vectors (MLA)", guards.has_latents),
    Feature("ngram", "n-gram speculation", guards.speculates_by("ngram")),
    Feature("suffix", "speculation by suffix trees", guards.speculates_by("suffix")),
    Feature("flashinfer", "FlashInfer", guards.uses_flashinfer),
    Feature("sleep", "sleep mode", guards.sleeps),
    Feature("lora", "LoRA adapters", guards.has_adapters, has_trial=False),
    Feature(
        "ranks",
        "tensor parallelism",
        guards.several("tensor_parallel"),
        has_trial=False,
    ),
)
"""What no run on a GPU has shown, or one check in float32 alone; CPUs are tested."""


def untested(vllm_config: Any) -> list[Feature]:
    """Return what a server uses and nobody has seen to work on this device."""
    if not guards.is_on_gpu(vllm_config):
        return []
    passed = verified()
    return [
        feature
        for feature in FEATURES
        if feature.name not in passed and feature.applies(vllm_config)
    ]


def tell_untested(vllm_config: Any) -> None:
    """Warn of each feature that no test has run here, with how to check it."""
    for feature in untested(vllm_config):
        what = f"KV policy: untested on this device: {feature.what}"
        if feature.has_trial:
            what += (
                f"; to check it, run `vllm-kvpolicy verify --feature {feature.name}`"
            )
        logger.warning(what)


# -- what has been checked here --------------------------------------------------------


def verified() -> set[str]:
    return set(_read().get(_here(), ()))


def remember(name: str) -> None:
    """Note that a feature works here; who cannot write it down is told again."""
    found = _read()
    found[_here()] = sorted({*found.get(_here(), ()), name})
    try:
        path = compat.cache_folder() / FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(found, indent=1))
        part.replace(path)
    except (OSError, RuntimeError) as error:
        logger.warning("cannot remember what was verified: %s", error)


def _here() -> str:
    versions = (f"{name} {compat.package_version(name)}" for name in RELIED_ON)
    return ", ".join([compat.device_name(), *versions])


def _read() -> dict[str, list[str]]:
    """Return names by device and versions; a file that is broken holds none."""
    try:
        found = json.loads((compat.cache_folder() / FILE).read_text())
    except (OSError, ValueError, RuntimeError):  # the last: nobody knows a home
        return {}
    if not isinstance(found, dict):
        return {}
    return {where: names for where, names in found.items() if isinstance(names, list)}
