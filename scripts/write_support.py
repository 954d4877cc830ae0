"""Writes docs/support.md from the tables that the code itself uses.

Called by `make docs`; a test compares the file with `render()`.
Process: any
"""

from pathlib import Path

from vllm_kvpolicy.compat import ATTENTION_BACKENDS, BLOCK_TOKENS, SUPPORTED_VLLM
from vllm_kvpolicy.config import INTEGER_KEYS, KVPolicyConfig
from vllm_kvpolicy.guards import REFUSALS
from vllm_kvpolicy.policies.registry import names, parse
from vllm_kvpolicy.request_guards import REQUEST_REFUSALS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "support.md"


def render() -> str:
    """Return the whole page."""
    sections = _head(), _policies(), _options(), _numbers(), _refusals()
    return "\n".join(line for section in sections for line in section) + "\n"


def _head() -> list[str]:
    blocks = ", ".join(f"{size} on {name}" for name, size in BLOCK_TOKENS.items())
    return [
        "# What is supported",
        "",
        "Made by `make docs` from the tables that the code uses; do not edit.",
        "",
        f"vLLM {SUPPORTED_VLLM}.x; attention backends {', '.join(ATTENTION_BACKENDS)}; "
        f"block size {blocks} unless one is given.",
        "",
    ]


def _policies() -> list[str]:
    lines = ["## Policies", "", "| name | keeps | source |", "|---|---|---|"]
    for name in names():
        info = parse(name)
        lines.append(f"| `{name}` | {info.summary} | {info.source} |")
    return [*lines, ""]


def _options() -> list[str]:
    """Return the options of each policy, with the values of each preset."""
    lines = [
        "## Options",
        "",
        "Keys of `--kv-policy-config`. A policy's query window may not be longer than "
        "the interval.",
        "",
        "| key | default | policies | meaning |",
        "|---|---|---|---|",
    ]
    infos = [parse(name) for name in names()]
    params = {param.name: param for info in infos for param in info.params}
    for key, param in params.items():
        users = ", ".join(f"`{info.name}`" for info in infos if param in info.params)
        lines.append(f"| `{key}` | {param.default} | {users} | {param.summary} |")
    presets = {name: values for info in infos for name, values in info.presets.items()}
    for name, values in presets.items():
        shown = ", ".join(f"{k} {v}" for k, v in values.items() if k in params)
        lines += ["", f"Preset `{name}`: {shown}."]
    return [*lines, ""]


def _numbers() -> list[str]:
    lines = [
        "## Numbers",
        "",
        "Tokens per KV head. Keys without a flag go into `--additional-config "
        "'{\"kv_policy\": {...}}'`.",
        "",
        "| flag or key | default | smallest | meaning |",
        "|---|---|---|---|",
    ]
    for key in INTEGER_KEYS:
        name = f"--kv-{key.key}" if key.is_flag else key.key
        default = getattr(KVPolicyConfig, key.field)
        shown = "auto" if default is None else default
        lines.append(f"| `{name}` | {shown} | {key.minimum} | {key.summary} |")
    return [*lines, ""]


def _refusals() -> list[str]:
    lines = [
        "## Refused beside a policy",
        "",
        "What is not tested is refused at start-up, all reasons at once.",
        "",
        "| feature | what to change |",
        "|---|---|",
        *(f"| {row.name} | {row.change} |" for row in REFUSALS),
        "",
        "Refused for one request, as an HTTP 400:",
        "",
        "| request | what to change |",
        "|---|---|",
        *(f"| {name} | {change} |" for name, change in REQUEST_REFUSALS.items()),
    ]
    return lines


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(render())
