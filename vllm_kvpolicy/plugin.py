"""The entry point that vLLM calls in every process that it starts.

Called by vLLM's plugin loader through the group `vllm.general_plugins`. Being installed
enables nothing: this teaches vLLM the flags, and importing it loads nothing.
Process: any
"""


def register() -> None:
    """Install the wraps that read the flags; idempotent."""
    from vllm_kvpolicy import patch

    patch.install()
