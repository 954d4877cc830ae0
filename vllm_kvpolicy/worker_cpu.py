"""vLLM's CPU worker with a policy; named by the finished VllmConfig.

Process: worker
"""

from vllm.v1.worker.cpu_worker import CPUWorker  # isort: skip  (vLLM: must come first)

import vllm_kvpolicy.attention.backend_cpu  # noqa: F401  registers the backend
from vllm_kvpolicy.worker import KVPolicyWorkerMixin


class KVPolicyCPUWorker(KVPolicyWorkerMixin, CPUWorker):
    """CPU worker that runs events."""
