"""The entry point that vLLM calls in every process it starts.

Called by vLLM's plugin loader through the group `vllm.general_plugins`. Installing the
package enables nothing: this only teaches vLLM the flags.
Process: any
"""


def register() -> None:
    """Install the flag patches once per process; cheap and idempotent."""
