"""vLLM's CPU worker with a policy; named by the finished VllmConfig."""

from vllm.v1.worker.cpu_worker import CPUWorker  # isort: skip  (vLLM: must come first)

from typing import Any

import numpy as np
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

import vllm_kvpolicy.worker.backends.cpu  # noqa: F401  registers the backend
from vllm_kvpolicy import compat
from vllm_kvpolicy.worker.worker import KVPolicyWorkerMixin

register_backend(AttentionBackendEnum.CPU_MLA, compat.LATENT_BACKENDS["CPU_MLA"])


class KVPolicyCPUWorker(KVPolicyWorkerMixin, CPUWorker):
    """CPU worker that runs events."""

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Sample, and hide the generators of requests whose sample is discarded.

        A step that computes only part of a request's known tokens samples for it
        anyway. vLLM 0.32 then rewinds the request's generator, which CPU generators do
        not support, and the engine would stop. Events cut prompts and recomputations
        into such steps. A generator that is not used needs no rewinding.
        """
        runner = self.model_runner
        if self.use_v2_model_runner or not runner.input_batch.generators:
            return super().sample_tokens(grammar_output)
        generators = runner.input_batch.generators
        is_partial = runner.discard_request_mask.np[: runner.input_batch.num_reqs]
        rows = [int(row) for row in np.flatnonzero(is_partial) if row in generators]
        unused = {row: generators.pop(row) for row in rows}
        try:
            return super().sample_tokens(grammar_output)
        finally:
            generators.update(unused)
