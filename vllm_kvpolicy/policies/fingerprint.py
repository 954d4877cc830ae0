"""A digest of policies, which ranks on other hosts compare before they serve."""

import hashlib
import inspect
import json
from pathlib import Path

from vllm_kvpolicy.config import KVPolicyConfig
from vllm_kvpolicy.policies.names import is_own
from vllm_kvpolicy.policies.options import names_file


def file_options(config: KVPolicyConfig) -> set[str]:
    """Return the options of a server's policies whose values name files or folders."""
    return {
        key
        for policy in config.all_resolved
        for key, field in policy.info.options.items()
        if names_file(field)
    }


def fingerprint(config: KVPolicyConfig) -> str:
    """Return a digest, hexadecimal, that differs where policies do.

    Args:
        config: the server's policies. Of files the contents count, those of users' own
            words included, of folders the names and sizes of their files, of all else
            the value.
    """
    values = config.to_dict()
    for key in ("trace_dir", "live", "live_text"):  # every host may have its own
        del values[key]
    options = values.pop("policy_config")
    code = [_code(word) for word in config.words if is_own(word)]
    for key in sorted(file_options(config) & options.keys()):
        if not options[key]:
            continue
        path = Path(options[key])
        if path.is_file():
            options[key] = _contents(path)
        elif path.is_dir():
            inside = (each for each in path.rglob("*") if each.is_file())
            sizes = [(str(p.relative_to(path)), p.stat().st_size) for p in inside]
            options[key] = sorted(sizes)
    text = json.dumps([values, options, code], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _code(word: type) -> str:
    """Return a digest of the file that defines a class, or its name without a file."""
    try:
        return _contents(Path(inspect.getfile(word)))
    except (OSError, TypeError):  # typed in, built in, or in an archive
        return f"{word.__module__}:{word.__qualname__}"


def _contents(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
