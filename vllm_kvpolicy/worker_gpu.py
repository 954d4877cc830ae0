"""vLLM's GPU worker with a policy; named by the finished VllmConfig.

Importing this module puts our backends in place of vLLM's. They are named, not
imported: a machine may lack the library of one of them.
Process: worker
"""

from typing import Any

from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.worker.gpu_worker import Worker

from vllm_kvpolicy.worker import KVPolicyWorkerMixin

BACKENDS = {
    AttentionBackendEnum.FLASH_ATTN: (
        "vllm_kvpolicy.attention.backend_flash.KVPolicyFlashBackend"
    ),
    AttentionBackendEnum.TRITON_ATTN: (
        "vllm_kvpolicy.attention.backend_triton.KVPolicyTritonBackend"
    ),
}
for _backend, _path in BACKENDS.items():
    register_backend(_backend, _path)


class KVPolicyGPUWorker(KVPolicyWorkerMixin, Worker):
    """GPU worker that runs events."""

    def compile_or_warm_up_model(self) -> Any:
        """Compile kernels of events too, before vLLM captures its graphs."""
        self.kv_policy.rehearse(self.model_config.max_model_len)
        return super().compile_or_warm_up_model()
