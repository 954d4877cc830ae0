"""What a policy adds to vLLM's worker: six short overrides.

Mixed into the platform's worker by worker_cpu and worker_gpu.
"""

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import fields
from typing import Any

from vllm.config import get_layers_from_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from vllm_kvpolicy import compat
from vllm_kvpolicy.block_manager.manager import KVPolicySpec
from vllm_kvpolicy.config import CONFIG_KEY, KVPolicyConfig
from vllm_kvpolicy.protocol import NO_COMMANDS, StepCommands, UsedBlocks
from vllm_kvpolicy.sizes import max_blocks_per_request
from vllm_kvpolicy.worker.runtime import KVPolicyRuntime

logger = init_logger("vllm.kv_policy")


class KVPolicyWorkerMixin:
    """Runs events before each forward pass and tells vLLM the true footprint."""

    _has_scheduler = False

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model with our attention backend and attach the runtime to it."""
        compat.forget_chosen_backends()
        super().load_model(*args, **kwargs)
        config = KVPolicyConfig.from_dict(
            self.vllm_config.additional_config[CONFIG_KEY]
        )
        layers = get_layers_from_vllm_config(self.vllm_config, Attention)
        reasons = layer_refusals(layers)
        if reasons:
            lines = "".join(f"\n  - {reason}" for reason in reasons)
            raise ValueError(f"--kv-policy {config.policy} cannot run here:{lines}")
        self.kv_policy_config = config
        self.kv_policy = KVPolicyRuntime(
            self.vllm_config,
            config,
            self.model_runner.get_model(),
            list(layers.values()),
            self.device,
        )

    def get_kv_cache_spec(self) -> dict[str, Any]:
        """Return the model's specs with the compressed footprint."""
        limit = max_blocks_per_request(self.vllm_config, self.kv_policy_config)
        return {
            name: _bounded(name, spec, limit)
            for name, spec in super().get_kv_cache_spec().items()
        }

    def determine_available_memory(self) -> int:
        """Return the bytes for the KV cache, less what policies hold beside it.

        Raises:
            ValueError: that leaves no room for a superblock.
        """
        available = super().determine_available_memory()
        specs = self.get_kv_cache_spec().values()
        superblock = sum(spec.page_size_bytes for spec in specs)
        is_explicit = self.cache_config.kv_cache_memory_bytes is not None
        # Elsewhere vLLM has measured what is in use on the device, this included.
        is_ours_to_count = is_explicit or self.device.type == "cpu"
        early = self.kv_policy.side_bytes if is_ours_to_count else 0
        late = self.kv_policy.late
        num_blocks = late.pool_blocks(available - early, superblock)
        if not num_blocks:
            raise ValueError(
                f"KV cache memory: expected {superblock} bytes for a superblock beside "
                f"{early + late.nbytes(1)} for query windows and tables of "
                f"--kv-policy, got {available} for both: lower --max-num-seqs or give "
                "more memory"
            )
        logger.info(
            "KV policy: %.1f MiB of %.1f MiB for query windows, tables and what is "
            "remembered of survivors",
            (early + late.nbytes(num_blocks)) / 2**20,
            available / 2**20,
        )
        return num_blocks * superblock

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Make the KV cache and take hold of it."""
        super().initialize_from_config(kv_cache_config)
        self.kv_policy.bind(self.kv_policy.layers[0].attn_backend.keys_are_columns)
        self._watch_rows()

    def _watch_rows(self) -> None:
        """Learn which request each row of a batch is, from either model runner.

        The V1 runner keeps the list, in row order, when it builds metadata. The V2
        runner hands its batch to `prepare_attn` just before; that one method of this
        one instance is wrapped.
        """
        runner, runtime = self.model_runner, self.kv_policy
        if not self.use_v2_model_runner:
            runtime.batch_request_ids = lambda: runner.input_batch.req_ids
            return
        prepare_attn = runner.prepare_attn

        def prepare_attn_and_note_rows(input_batch: Any) -> Any:
            runtime.batch_request_ids = lambda: input_batch.req_ids
            return prepare_attn(input_batch)

        runner.prepare_attn = prepare_attn_and_note_rows

    def _commands_of(self, scheduler_output: Any) -> StepCommands:
        """Return the step's commands; vLLM's own warm-up steps have none.

        Raises:
            RuntimeError: a step without commands after one with: the scheduler's
                messages are lost, and blocks are freed that nobody compacted.
        """
        commands = getattr(scheduler_output, "kv_policy", None)
        if commands is None and self._has_scheduler:
            raise RuntimeError("a step came without the KV policy's commands")
        self._has_scheduler |= commands is not None
        return commands or NO_COMMANDS

    def execute_model(self, scheduler_output: Any) -> Any:
        """Run the step's events, then the step."""
        commands = self._commands_of(scheduler_output)
        gone = scheduler_output.finished_req_ids | (
            scheduler_output.preempted_req_ids or set()
        )
        self.kv_policy.begin_step(commands, gone)
        try:
            return super().execute_model(scheduler_output)
        finally:
            self.kv_policy.end_step()

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """Sample, and let the scheduler hear what events left of their blocks."""
        output = super().sample_tokens(*args, **kwargs)
        read_answers = self.kv_policy.take_answers()
        if read_answers is None:
            return output
        if isinstance(output, AsyncModelRunnerOutput):
            return AnsweredLater(output, read_answers)
        return _answered(output, read_answers)


class AnsweredLater(AsyncModelRunnerOutput):
    """An output whose tokens are still under way, with answers to its step's events.

    Args:
        output: what vLLM's model runner returned.
        read_answers: returns what the scheduler has to hear.
    """

    def __init__(
        self,
        output: AsyncModelRunnerOutput,
        read_answers: Callable[[], tuple[UsedBlocks, ...]],
    ) -> None:
        self.output, self.read_answers = output, read_answers

    def get_output(self) -> ModelRunnerOutput:
        """Wait for the tokens, computed after what the answers tell."""
        return _answered(self.output.get_output(), self.read_answers)


def _answered(output: Any, read_answers: Callable[[], tuple[UsedBlocks, ...]]) -> Any:
    """Return a copy with answers: vLLM shares one object between empty outputs."""
    output = copy(output)
    output.kv_policy = read_answers()
    return output


def layer_refusals(layers: Mapping[str, Any]) -> list[str]:
    """Return why these attention layers cannot run with a policy, one line a reason.

    What only a loaded model tells; everything else is refused earlier, by guards.

    Args:
        layers: vLLM's attention layers by name.
    """
    if not layers:
        return ["no attention layers were found in the model"]
    known = ", ".join(compat.ATTENTION_BACKENDS)
    checks = {
        f"an attention backend other than {known}": lambda layer: (
            not hasattr(layer.attn_backend, "keys_are_columns")
        ),
        "ALiBi, which measures distances that events change": lambda layer: (
            getattr(layer.impl, "alibi_slopes", None) is not None
        ),
        "a cap on attention logits, which scores do not know": lambda layer: bool(
            getattr(layer.impl, "logits_soft_cap", None)
        ),
        "learned attention sinks, which scores do not know": lambda layer: (
            getattr(layer.impl, "sinks", None) is not None
        ),
        "keys and values of another layer": lambda layer: (
            getattr(layer, "kv_sharing_target_layer_name", None) is not None
        ),
        "a quantised KV cache": lambda layer: layer.kv_cache_dtype != "auto",
        "another softmax scale or number of heads than the first layer": lambda layer: (
            _geometry(layer) != _geometry(first)
        ),
    }
    first = next(iter(layers.values()))
    concerned = {
        reason: [name for name, layer in layers.items() if applies(layer)]
        for reason, applies in checks.items()
    }
    return [
        f"{names[0]} has {reason}" + f" ({len(names)} layers)" * (len(names) > 1)
        for reason, names in concerned.items()
        if names
    ]


def _geometry(layer: Any) -> tuple[float, int, int]:
    return layer.impl.scale, layer.num_heads, layer.num_kv_heads


def _bounded(name: str, spec: Any, limit: int) -> KVPolicySpec:
    if type(spec) is not FullAttentionSpec:
        raise ValueError(
            f"--kv-policy needs full attention in every layer; {name} has "
            f"{type(spec).__name__}"
        )
    known = {field.name: getattr(spec, field.name) for field in fields(spec)}
    return KVPolicySpec(**known, max_blocks_per_request=limit)
