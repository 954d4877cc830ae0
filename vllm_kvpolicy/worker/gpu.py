"""vLLM's GPU worker with a policy; named by the finished VllmConfig.

Importing this module puts our backends in place of vLLM's.
"""

from typing import Any

from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.worker.gpu_worker import Worker

from vllm_kvpolicy import compat
from vllm_kvpolicy.worker.base import KVPolicyWorkerMixin

for _name, _path in compat.GPU_BACKENDS.items():
    register_backend(AttentionBackendEnum[_name], _path)


class KVPolicyGPUWorker(KVPolicyWorkerMixin, Worker):
    """GPU worker that runs events."""

    def compile_or_warm_up_model(self) -> Any:
        """Compile kernels of events too, before vLLM captures its graphs."""
        self.kv_policy.rehearse(self.model_config.max_model_len)
        return super().compile_or_warm_up_model()
