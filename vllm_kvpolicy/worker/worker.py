"""The mixin that lets vLLM's worker run events before a forward pass."""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import fields
from functools import partial
from types import FunctionType
from typing import Any

from torch import nn
from vllm.config import get_layers_from_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from vllm_kvpolicy import compat
from vllm_kvpolicy.block_manager.manager import KVPolicyLatentSpec, KVPolicySpec
from vllm_kvpolicy.config_values import own_config
from vllm_kvpolicy.protocol import NO_COMMANDS, StepCommands, UsedBlocks
from vllm_kvpolicy.sizes import (
    OtherGroups,
    max_blocks_per_request,
    other_groups,
    own_block_size,
)
from vllm_kvpolicy.worker.latents import is_latent
from vllm_kvpolicy.worker.layers import has_sinks
from vllm_kvpolicy.worker.setup import WorkerSetup, too_small
from vllm_kvpolicy.worker.tensor_parallel import check_hosts, ends_its_rank

logger = init_logger("vllm.kv_policy")
OTHERS = (SlidingWindowSpec, MambaSpec)  # specs that stay vLLM's
BOUNDED = {FullAttentionSpec: KVPolicySpec, MLAAttentionSpec: KVPolicyLatentSpec}


class KVPolicyWorkerMixin:
    """Runs events before forward passes; tells vLLM the compressed footprint."""

    _has_scheduler = False

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model with our attention backend and hook captures to it."""
        config = own_config(self.vllm_config)
        check_hosts(self.vllm_config, config)
        compat.forget_chosen_backends()
        stated = self.cache_config.cache_dtype  # which checkpoints may change
        super().load_model(*args, **kwargs)
        model = model_with_drafter(self.model_runner)
        layers: dict[str, Any] = {}
        for kind in (Attention, MLAAttention):
            layers |= get_layers_from_vllm_config(self.vllm_config, kind)
        # No policy is for layers that attend to a window.
        layers = {
            name: layer
            for name, layer in layers.items()
            if getattr(layer, "sliding_window", None) is None
        }
        readers = {name for name, layer in layers.items() if source_of(layer)}
        if reasons := layer_refusals(layers, stated):
            lines = "".join(f"\n  - {reason}" for reason in reasons)
            raise ValueError(
                f"--kv-policy {config.policy} cannot run on this model:{lines}"
            )
        self.kv_policy_config = config
        self._readers = {each: source_of(layers.pop(each)) for each in readers}
        self.kv_policy_setup = WorkerSetup(
            self.vllm_config, config, model, list(layers.values()), self.device
        )
        self.vllm_config.additional_config.set_graph(
            traced_parts(model, list(layers.values()))
        )

    def get_kv_cache_spec(self) -> dict[str, Any]:
        """Return the model's specs with the compressed footprint."""
        specs = super().get_kv_cache_spec()
        sizes = other_groups(self.vllm_config), own_block_size(self.vllm_config)
        check_groups(specs, *sizes)
        return {name: _bounded(spec) for name, spec in specs.items()}

    def determine_available_memory(self) -> int:
        """Return the bytes for the KV cache, after the tables of policies.

        Raises:
            ValueError: not even one request fits, beside vLLM's null block; of one
                token where vLLM searches for the longest one afterwards.
        """
        is_explicit = self.cache_config.kv_cache_memory_bytes is not None
        available = super().determine_available_memory()
        specs = list(self.get_kv_cache_spec().values())
        groups = other_groups(self.vllm_config)
        num_layers = groups.layers_per_group if groups.count else len(specs)
        # vLLM gives all groups superblocks of the size of the largest.
        superblock = num_layers * max(spec.page_size_bytes for spec in specs)
        # Otherwise vLLM has already measured it as memory in use on the device.
        is_ours_to_count = is_explicit or self.device.type == "cpu"
        early = self.kv_policy_setup.early_bytes if is_ours_to_count else 0
        beside = self.kv_policy_setup.side_tables
        num_blocks = beside.pool_blocks(available - early, superblock)
        is_searched = self.model_config.original_max_model_len == -1
        longest = 1 if is_searched else self.model_config.max_model_len
        sizes = self.vllm_config, self.kv_policy_config, longest
        needed = max_blocks_per_request(*sizes) + groups.most_blocks(longest)
        # vLLM takes a number of superblocks that the user gives in place of ours.
        is_given = num_blocks and self.cache_config.num_gpu_blocks_override is not None
        if num_blocks <= needed and not is_given:
            enough = early + beside.nbytes(needed + 1) + (needed + 1) * superblock
            shares = self.kv_policy_setup.shares(num_blocks, is_ours_to_count)
            counts = num_blocks, needed
            raise ValueError(too_small(available, counts, superblock, shares, enough))
        logger.info(
            "KV policy: tables and the values that policies store per kept token "
            "take %.1f MiB of %.1f MiB",
            (early + beside.nbytes(num_blocks)) / 2**20,
            available / 2**20,
        )
        return num_blocks * superblock

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Make the KV cache, then build the runtime over it."""
        super().initialize_from_config(kv_cache_config)
        first = self.kv_policy_setup.layers[0]
        columns = first.attn_backend.keys_are_columns
        self.kv_policy_runtime = self.kv_policy_setup.bind(columns)
        known = get_layers_from_vllm_config(self.vllm_config, Attention)
        for name, source in self._readers.items():
            known[name].kv_policy_runtime = self.kv_policy_runtime
            known[name].kv_policy_index = known[source].kv_policy_index
        self._watch_rows()

    def _watch_rows(self) -> None:
        """Let the runtime see which request each row of a batch belongs to.

        The V1 runner has the list, in row order, when it builds metadata. The V2 runner
        passes its batch to `prepare_attn` just before; that method of this one instance
        is wrapped.
        """
        runner, runtime = self.model_runner, self.kv_policy_runtime
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
            RuntimeError: a step without commands follows one with commands: the
                scheduler's messages are lost, and it frees blocks whose survivors have
                not been moved.
        """
        commands = getattr(scheduler_output, "kv_policy_commands", None)
        if commands is None and self._has_scheduler:
            raise RuntimeError("got a step without the KV policy's commands")
        self._has_scheduler |= commands is not None
        return commands or NO_COMMANDS

    def execute_model(self, scheduler_output: Any) -> Any:
        """Run the step's events, then its forward pass."""
        commands = self._commands_of(scheduler_output)
        gone = scheduler_output.finished_req_ids | (
            scheduler_output.preempted_req_ids or set()
        )
        with ends_its_rank(self.kv_policy_setup.shard):
            self.kv_policy_runtime.begin(commands, gone)
            try:
                return super().execute_model(scheduler_output)
            finally:
                if not self.vllm_config.num_lookahead_tokens:
                    self.kv_policy_runtime.end()

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """Sample, and tell the scheduler how many blocks events have left in use.

        Layers that draft do so here, and the step ends behind them.
        """
        output = super().sample_tokens(*args, **kwargs)
        self.kv_policy_runtime.end()
        read_answers = self.kv_policy_runtime.take_answers()
        if read_answers is None:
            return output
        if isinstance(output, AsyncModelRunnerOutput):
            return LateAnswers(output, read_answers)
        return _answered(output, read_answers)


def model_with_drafter(runner: Any) -> nn.Module:
    """Return the loaded model, in a list with the layers that draft, if any do."""
    drafter = getattr(getattr(runner, "drafter", None), "model", None)
    model: nn.Module = runner.get_model()
    return nn.ModuleList([model, drafter]) if drafter is not None else model


class LateAnswers(AsyncModelRunnerOutput):
    """An asynchronous output that carries the answers to its step's events."""

    def __init__(
        self,
        output: AsyncModelRunnerOutput,
        read_answers: Callable[[], tuple[UsedBlocks, ...]],
    ) -> None:
        self.output, self.read_answers = output, read_answers

    def get_output(self) -> ModelRunnerOutput:
        """Wait for the tokens; the answers were computed before them."""
        return _answered(self.output.get_output(), self.read_answers)

    def get_kv_connector_output(self) -> Any:
        """Return what a KV connector did in this step; vLLM 0.33 asks for it."""
        return self.output.get_kv_connector_output()


def _answered(output: Any, read_answers: Callable[[], tuple[UsedBlocks, ...]]) -> Any:
    """Return a copy with the answers: vLLM shares one object for all empty outputs."""
    output = copy(output)
    output.kv_policy_answers = read_answers()
    return output


def layer_refusals(layers: Mapping[str, Any], cache_dtype: str) -> list[str]:
    """Return why these attention layers cannot run with a policy, one line per reason.

    Only what the loaded model tells; `api.guards` refuses everything else earlier.

    Args:
        cache_dtype: of the KV cache, as the scheduler knows it.
    """
    if not layers:
        return ["no attention layers were found in the model"]
    known = ", ".join([*compat.ATTENTION_BACKENDS, *compat.LATENT_BACKENDS])
    checks = {
        f"an attention backend other than {known}": lambda layer: (
            not hasattr(layer.attn_backend, "keys_are_columns")
        ),
        "ALiBi, whose biases depend on distances that events change": lambda layer: (
            getattr(layer.impl, "alibi_slopes", None) is not None
        ),
        "an attention logit soft cap, which scorers do not model": lambda layer: bool(
            getattr(layer.impl, "logits_soft_cap", None)
        ),
        "learned sinks, or none, unlike the first layer": lambda layer: (
            has_sinks(layer) != has_sinks(first)
        ),
        "the keys and values of a layer without full attention": lambda layer: (
            source_of(layer) not in {None, *layers}
        ),
        "a model that writes keys and values itself, unseen": lambda layer: getattr(
            layer, "kv_cache_update_bypass", False
        ),
        f"a KV cache of another kind than --kv-cache-dtype {cache_dtype}": (
            lambda layer: layer.kv_cache_dtype != cache_dtype
        ),
        "sparse attention of its own": lambda layer: vars(layer).get("use_sparse"),
        "a KV cache of a dtype other than the model's and FP8": lambda layer: (
            not is_latent(layer)
            and layer.kv_cache_dtype not in compat.FLOAT8_CACHES
            and layer.kv_cache_torch_dtype != layer.dtype
        ),
        "an FP8 scale for each KV head, where scorers know one per layer": (
            lambda layer: (
                layer.kv_cache_dtype in compat.FLOAT8_CACHES
                and max(layer._k_scale.numel(), layer._v_scale.numel()) > 1
            )
        ),
        "a softmax scale, or heads, unlike the first layer's": lambda layer: (
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


def _geometry(layer: Any) -> tuple[float, int, int, int]:
    return layer.impl.scale, layer.num_heads, layer.num_kv_heads, layer.head_size


def source_of(layer: Any) -> str | None:
    """Return the name of the layer whose keys and values a layer reads, or None.

    That layer's queries alone decide what is kept.
    """
    return getattr(layer, "kv_sharing_target_layer_name", None)


def check_groups(
    specs: Mapping[str, Any], groups: OtherGroups, block_size: int
) -> None:
    """Raise ValueError for layers of kinds, numbers or sizes that were not expected.

    Args:
        specs: by layer, of one number of tokens per superblock each.
        block_size: N, that layers of full attention are going to have.
    """
    kinds = {type(spec) for spec in specs.values()}
    odd = sorted(kind.__name__ for kind in kinds - {*BOUNDED, *OTHERS})
    if odd:
        raise ValueError(
            "--kv-policy needs layers of full attention, with a sliding window or with "
            f"a state; this model has {', '.join(odd)}"
        )
    others = [spec for spec in specs.values() if type(spec) in OTHERS]
    # A state is a window of two tokens, see `OtherGroups`.
    windows = [getattr(spec, "sliding_window", 2) for spec in others]
    sizes = {_final_bytes(spec, groups, block_size) for spec in specs.values()}
    expected = [groups.window] * groups.num_others
    if windows != expected or len(set(others)) > 1 or (windows and len(sizes) > 1):
        raise ValueError(
            f"--kv-policy: vLLM made {len(windows)} layers with windows of "
            f"{sorted(set(windows))} tokens, of {len(set(others))} kinds, and pages of "
            f"{len(sizes)} sizes, expected {groups.num_others} with a window of "
            f"{groups.window} (2 for a state), and one size: serve a model whose "
            "layers differ in their windows alone"
        )


def _final_bytes(spec: Any, groups: OtherGroups, block_size: int) -> int:
    """Return the bytes of a layer's superblocks when vLLM has lengthened them."""
    if isinstance(spec, MambaSpec):  # whose superblocks are as large already
        return int(spec.page_size_bytes)
    tokens = groups.block_size if type(spec) in OTHERS else block_size
    return int(spec.page_size_bytes * tokens // spec.block_size)


def _bounded(spec: Any) -> Any:
    """Return the spec with the compressed footprint; of other layers, what it is."""
    if type(spec) in OTHERS:
        return spec
    known = {field.name: getattr(spec, field.name) for field in fields(spec)}
    return BOUNDED[type(spec)](**known)


# -- what compiled code depends on ---------------------------------------------

PACKAGE = __name__.partition(".")[0]
PREFIX = "kv_policy_"  # of the submodules that hooks read
HOOKS = ("_forward_pre_hooks", "_forward_hooks")  # where PyTorch keeps them
CONSTANTS = int | float | str | bool | None


def traced_parts(model: nn.Module, layers: Sequence[Any]) -> list[str]:
    """Return a line for each hook, each module that hooks read, and for attention.

    Args:
        model: vLLM's model with all hooks attached.

    Raises:
        TypeError: compiled code would depend on something that cannot be described.
    """
    parts = [f"attention {_name(layer.attn_backend)}" for layer in layers]
    for path, module in model.named_modules():
        parts += [f"{path}: hook {_name(hook)}" for hook in _own_hooks(module)]
        if PREFIX in path:
            parts.append(f"{path}: {_module_text(module)}")
    return parts


def _own_hooks(module: nn.Module) -> list[Callable[..., Any]]:
    own = [
        hook
        for kind in HOOKS
        for hook in vars(module)[kind].values()
        if _package(hook) == PACKAGE
    ]
    for hook in own:
        if not isinstance(hook, FunctionType) or hook.__closure__:
            raise TypeError(
                f"forward hook: got {hook!r}, expected a plain function: what else it "
                "holds would be part of compiled code"
            )
    return own


def _module_text(module: nn.Module) -> str:
    """Return class, constants, and names, dtypes and layouts of tensors."""
    constants = {k: v for k, v in vars(module).items() if not k.startswith("_")}
    for name, value in constants.items():
        if not isinstance(value, CONSTANTS):
            raise TypeError(
                f"{name} of {_name(type(module))}: got {type(value).__name__}, "
                "expected a buffer, a number or a string"
            )
    own = *module.named_buffers(recurse=False), *module.named_parameters(recurse=False)
    tensors = [
        f"{name} {tensor.dtype} {list(tensor.shape)} {tensor.stride()}"
        for name, tensor in own
    ]
    return f"{_name(type(module))} {constants} {tensors}"


def _package(item: Any) -> str:
    """Return the package of a function, or of the class of anything else."""
    while isinstance(item, partial):
        item = item.func
    home = getattr(item, "__module__", None) or type(item).__module__
    return str(home).partition(".")[0]


def _name(item: Any) -> str:
    return f"{item.__module__}.{item.__qualname__}"
