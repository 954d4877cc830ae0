"""The entry point that vLLM calls in every process that it starts."""


def register() -> None:
    """Install the wraps that read the flags; idempotent."""
    from vllm import ModelRegistry

    from vllm_kvpolicy.api import patch
    from vllm_kvpolicy.policies.catalogue.admissions import ADMISSIONS

    patch.install()
    known = ModelRegistry.get_supported_archs()
    for row in ADMISSIONS.values():
        for name in row.architectures.keys() - known:
            ModelRegistry.register_model(name, row.architectures[name])
