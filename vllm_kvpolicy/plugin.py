"""The entry point that vLLM calls in every process that it starts."""

# policies.admissions.dms.model has the name, too.
ARCHITECTURES = {
    "Qwen3ForCausalLMDMS": (
        "vllm_kvpolicy.policies.admissions.dms.checkpoint:Qwen3ForCausalLMDMS"
    ),
}


def register() -> None:
    """Install the wraps that read the flags; idempotent."""
    from vllm import ModelRegistry

    from vllm_kvpolicy.api import patch

    patch.install()
    for name in ARCHITECTURES.keys() - ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(name, ARCHITECTURES[name])
