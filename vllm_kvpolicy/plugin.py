"""The entry point that vLLM calls in every process that it starts."""


def register() -> None:
    """Install the wraps that read the flags; idempotent."""
    from vllm import ModelRegistry

    from vllm_kvpolicy.api import patch
    from vllm_kvpolicy.policies.names import architectures

    patch.install()
    known = ModelRegistry.get_supported_archs()
    for name, path in architectures().items():
        if name not in known:
            ModelRegistry.register_model(name, path)
