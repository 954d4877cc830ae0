"""What processes with command lines of their own compare before they serve together."""

import hashlib
import json
from pathlib import Path

from vllm_kvpolicy.config import KVPolicyConfig
from vllm_kvpolicy.policies.catalogue.names import parse
from vllm_kvpolicy.policies.catalogue.options import names_file


def file_options(config: KVPolicyConfig) -> set[str]:
    """Return the options of a server's policies whose values name files or folders."""
    return {
        key
        for name in config.policies
        for key, field in parse(name).options.items()
        if names_file(field)
    }


def fingerprint(config: KVPolicyConfig) -> str:
    """Return a digest, hexadecimal, that differs where policies do.

    Args:
        config: the server's policies. Of files the contents count, of folders the names
            and sizes of their files, of all else the value.
    """
    values = config.to_dict()
    for key in ("trace_dir", "live", "live_text"):  # every host may have its own
        del values[key]
    options = values.pop("policy_config")
    for key in sorted(file_options(config) & options.keys()):
        path = Path(options[key] or "")
        if path.is_file():
            with path.open("rb") as file:
                options[key] = hashlib.file_digest(file, "sha256").hexdigest()
        elif path.is_dir():
            inside = (each for each in path.rglob("*") if each.is_file())
            sizes = [(str(p.relative_to(path)), p.stat().st_size) for p in inside]
            options[key] = sorted(sizes)
    text = json.dumps([values, options], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
