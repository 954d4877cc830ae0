"""vLLM's GPU worker with a policy; named by the finished VllmConfig.

Importing this module puts our backends in place of vLLM's.
"""

from typing import Any

from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.worker.gpu_worker import Worker

from vllm_kvpolicy import compat
from vllm_kvpolicy.worker.warmup import warm_up
from vllm_kvpolicy.worker.worker import KVPolicyWorkerMixin

_latent = {"TRITON_MLA": compat.LATENT_BACKENDS["TRITON_MLA"]}
for _name, _path in (compat.GPU_BACKENDS | _latent).items():
    register_backend(AttentionBackendEnum[_name], _path)


class KVPolicyGPUWorker(KVPolicyWorkerMixin, Worker):
    """GPU worker that runs events."""

    def compile_or_warm_up_model(self) -> Any:
        """Warm up the kernels of events, too, before vLLM captures its graphs."""
        pool = self.kv_policy_runtime.compactor.pool
        warm_up(self.kv_policy_runtime, self.kv_policy_setup.dummy_events(pool))
        return super().compile_or_warm_up_model()
