"""The entry point that vLLM calls in every process that it starts.

Called by vLLM's plugin loader through the group `vllm.general_plugins`. Being installed
enables nothing: this teaches vLLM the flags and one name of an architecture, and
importing it loads nothing.
Process: any
"""

# admission.dms_model has the name, too.
ARCHITECTURES = {
    "Qwen3ForCausalLMDMS": "vllm_kvpolicy.dms_checkpoint:Qwen3ForCausalLMDMS",
}


def register() -> None:
    """Install the wraps that read the flags; idempotent."""
    from vllm import ModelRegistry

    from vllm_kvpolicy import patch

    patch.install()
    for name in ARCHITECTURES.keys() - ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(name, ARCHITECTURES[name])
