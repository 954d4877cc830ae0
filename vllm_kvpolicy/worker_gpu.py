"""vLLM's GPU worker with a policy; named by the finished VllmConfig.

Process: worker
"""

from typing import Any

from vllm.v1.worker.gpu_worker import Worker

import vllm_kvpolicy.attention.backend_flash  # registers the backend
import vllm_kvpolicy.attention.backend_triton  # noqa: F401  registers the backend
from vllm_kvpolicy.worker import KVPolicyWorkerMixin


class KVPolicyGPUWorker(KVPolicyWorkerMixin, Worker):
    """GPU worker that runs events."""

    def compile_or_warm_up_model(self) -> Any:
        """Compile kernels of events too, before vLLM captures its graphs."""
        self.kv_policy.rehearse(self.model_config.max_model_len)
        return super().compile_or_warm_up_model()
