"""The command `plan`: how many requests a KV cache of so many bytes bears at once."""

import argparse
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from operator import or_
from types import SimpleNamespace
from typing import Any

from vllm_kvpolicy import compat, sizes
from vllm_kvpolicy.api import cli
from vllm_kvpolicy.block_manager.planner import RequestPlan, RequestState
from vllm_kvpolicy.commands.capacity import Life, most_at_once
from vllm_kvpolicy.commands.inputs import memory_bytes, positive
from vllm_kvpolicy.commands.outputs import quiet, table
from vllm_kvpolicy.commands.reads import step_in_words, weight_bytes
from vllm_kvpolicy.config import KVPolicyConfig
from vllm_kvpolicy.config_keys import PRESSURE
from vllm_kvpolicy.events import Footprint
from vllm_kvpolicy.policies.base import Needs
from vllm_kvpolicy.policies.compose import assemble
from vllm_kvpolicy.worker.setup import SideTables

# -- the command ---------------------------------------------------------------

# Quarters of budget and interval, for further lines of the table.
NEIGHBOURS = ((4, 2), (4, 1), (3, 4), (3, 2), (2, 4))
HEAD = (
    *("KV cache", "budget", "interval", "pool", "peak", "mean"),
    *("after event", "window", "at once"),
)
LEGEND = """\
pool to window: superblocks of {} tokens, also for stock, of {:,} bytes, in FP8 {:,}.
peak, mean: of one request, at its highest and on average while it answers; after event:
  at most, right after one in the answer; window: what of the peak is for queries.
at once: requests whose answers begin together, nobody waiting for a superblock.
Taken off the pool: vLLM's null block, and what policies keep per token and
  page. Not: buffers for queries and signals of one step, tables of attention."""


@dataclass(frozen=True)
class Engine:
    """What the plan knows of an engine.

    Args:
        lengths: tokens of prompt and answer; requests take turns.
        is_widened: in float32 for the sake of this CPU, not by the model or its user.
    """

    vllm_config: Any
    available: int
    lengths: tuple[tuple[int, int], ...]
    is_widened: bool = False

    @property
    def block_size(self) -> int:
        return sizes.own_block_size(self.vllm_config)

    @property
    def model(self) -> Any:
        return self.vllm_config.model_config

    @cached_property
    def others(self) -> sizes.OtherGroups:
        return sizes.other_groups(self.vllm_config)

    @property
    def num_layers(self) -> int:
        return sizes.full_layers(self.vllm_config)

    def beside(self, num_tokens: int) -> tuple[int, float]:
        """Return what a request holds in their groups, at most and on the average."""
        most = self.others.most_blocks(num_tokens, 1)
        return most, min(most, self.others.mean_blocks)

    @cached_property
    def kv_heads(self) -> tuple[int, int]:
        return sizes.kv_heads(self.vllm_config)

    @property
    def is_fp8(self) -> bool:
        return self.vllm_config.cache_config.cache_dtype in compat.FLOAT8_CACHES

    def superblock_bytes(self, is_fp8: bool) -> int:
        """Return the bytes of a block of all layers, by vLLM's own count."""
        import torch
        from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

        kind = MLAAttentionSpec if self.model.use_mla else FullAttentionSpec
        spec = kind(
            block_size=self.block_size,
            num_kv_heads=self.kv_heads[0],
            head_size=self.kv_heads[1],
            dtype=torch.uint8 if is_fp8 else self.model.dtype,
        )
        groups = self.others
        num_layers = groups.layers_per_group if groups.count else self.num_layers
        return num_layers * spec.page_size_bytes


def main(words: list[str]) -> None:
    """Print the plan; ValueError with the reason where it cannot be made."""
    args = _parser().parse_args(words)
    given = cli.given_values(vars(args))
    if "policy" not in given:
        raise ValueError(
            "--kv-policy: missing, expected the policy to compare stock with"
        )
    config = KVPolicyConfig.from_dict(given)
    with quiet():
        engine = _engine(args)
    if engine.model.use_mla and any(word.reads_heads for word in config.words):
        raise ValueError(
            f"{config.policy}: needs KV heads, which MLA has not; try tova"
        )
    if config.budget_word:
        blocks = _pool_blocks(engine, config)
        tokens = sizes.worded_budget(engine.vllm_config, config, blocks)
        config = config.with_budget(tokens)
    config.validate_block_size(engine.block_size)
    stock = [*_stock(engine)]
    lines = [*stock, *_policies(engine, config)]
    print(_title(engine))
    print(table([HEAD, *lines]))
    nbytes = [engine.superblock_bytes(is_fp8) for is_fp8 in (False, True)]
    print(LEGEND.format(engine.block_size, *nbytes))
    for note in _notes(engine, config, lines, len(stock)):
        print(note)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vllm-kvpolicy plan",
        description="Say how many requests a KV cache bears at once, with stock vLLM "
        "and with a policy. Reads the model's config.json, no weights.",
    )
    parser.add_argument("model", help="folder, or name on the Hugging Face hub")
    parser.add_argument(
        "--kv-cache-memory",
        "--kv-cache-memory-bytes",
        metavar="BYTES",
        required=True,
        type=memory_bytes,
        help="such as 24GiB or 500M (1024 * 1024 bytes each); with GB, 1000 ** 3",
    )
    for name in ("prompt", "output"):
        parser.add_argument(
            f"--{name}-tokens",
            metavar="TOKENS",
            nargs="+",
            required=True,
            type=positive,
            help=f"length of each {name}; of several, requests take turns",
        )
    parser.add_argument("--block-size", type=positive, help="tokens per superblock")
    parser.add_argument("--dtype", default="auto", help="as of vllm serve")
    parser.add_argument(
        "--kv-cache-dtype",
        default="auto",
        choices=("auto", *compat.FLOAT8_CACHES),
        help="the same, of the lines with a policy",
    )
    parser.add_argument("--max-model-len", type=positive, help="as of vllm serve")
    parser.add_argument("--max-num-seqs", type=positive, default=256, help="the same")
    cli.add_arguments(parser)
    return parser


# -- what the numbers are of ---------------------------------------------------


def _engine(args: argparse.Namespace) -> Engine:
    """Return what the command line says of an engine.

    Raises:
        ValueError: the model is unknown or unlike what is planned, or the lengths are
            longer than its context.
    """
    import torch
    from vllm.config import ParallelConfig

    model = _model(args)
    is_widened = (
        args.dtype == "auto"
        and model.dtype is torch.bfloat16
        and compat.platform_name() == "cpu"
        and not compat.multiplies_bfloat16()
    )
    if is_widened:
        model.dtype = torch.float32
    block_size = args.block_size or compat.block_tokens(model)
    cache = {"block_size": block_size, "cache_dtype": args.kv_cache_dtype}
    vllm_config = SimpleNamespace(
        model_config=model,
        parallel_config=ParallelConfig(),
        cache_config=SimpleNamespace(**cache),
        num_lookahead_tokens=0,
        scheduler_config=SimpleNamespace(
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=0,  # what prompts hold in windows is not counted
            async_scheduling=False,
        ),
    )
    if model.is_hybrid:
        if args.kv_cache_dtype != "auto":
            raise ValueError(
                "--kv-cache-dtype: leave it out; beside states a superblock in FP8 has "
                "more tokens than stock's, with which this table would compare it"
            )
        vllm_config = _with_states(args, model)
    prompts, outputs = args.prompt_tokens, args.output_tokens
    count = max(len(prompts), len(outputs))
    if {len(prompts), len(outputs)} - {1, count}:
        raise ValueError(
            f"--output-tokens: got {len(outputs)} lengths for {len(prompts)} of "
            "--prompt-tokens, expected one or as many"
        )
    prompts, outputs = (each * (count // len(each)) for each in (prompts, outputs))
    lengths = tuple(zip(prompts, outputs, strict=True))
    longest = max(map(sum, lengths))
    if longest > model.max_model_len:
        raise ValueError(
            f"a request of {longest} tokens is longer than the model's context of "
            f"{model.max_model_len}"
        )
    return Engine(vllm_config, args.kv_cache_memory, lengths, is_widened)


def _with_states(args: argparse.Namespace, model: Any) -> Any:
    """Return vLLM's configuration of a model with states, whose size N depends on."""
    from vllm.engine.arg_utils import EngineArgs

    vllm_config = EngineArgs(
        model=args.model,
        dtype=str(model.dtype).removeprefix("torch."),
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        block_size=args.block_size or compat.block_tokens(model),
        skip_tokenizer_init=True,
    ).create_engine_config()
    compat.align_states(vllm_config)
    return vllm_config


def _model(args: argparse.Namespace) -> Any:
    """Return vLLM's ModelConfig, made from config.json alone."""
    from vllm.engine.arg_utils import EngineArgs

    try:
        model = EngineArgs(
            model=args.model,
            dtype=args.dtype,
            max_model_len=args.max_model_len,
            skip_tokenizer_init=True,
        ).create_model_config()
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"cannot read the configuration of {args.model!r}: {reason[:300]}"
        ) from None
    config = SimpleNamespace(model_config=model)
    kinds = set(sizes.layer_kinds(config))
    odd = model.is_attention_free or bool(kinds and sizes.FULL not in kinds)
    sparse = hasattr(model.hf_text_config, "index_topk")
    odd |= model.use_mla and (sparse or model.is_hybrid)
    odd |= sizes.has_other_values(config) or model.is_hybrid > (sizes.STATE in kinds)
    if odd or kinds - {sizes.FULL, sizes.SLIDING, sizes.STATE}:
        raise ValueError(
            f"{args.model}: what its layers hold is not known to this command, only "
            "that of full attention beside sliding windows or states"
        )
    return model


# -- lines of the table --------------------------------------------------------


def _stock(engine: Engine) -> Iterator[tuple[str, ...]]:
    """Yield a line for stock vLLM and one for its KV cache in FP8.

    Beside states a superblock in FP8 would have another size.
    """
    lives, kinds = _whole(engine), (("stock", False), ("stock, FP8", True))
    for name, is_fp8 in kinds[: 1 if engine.model.is_hybrid else 2]:
        usable = max(engine.available // engine.superblock_bytes(is_fp8) - 1, 0)
        yield (name, "", "", *_numbers(lives, usable))


def _whole(engine: Engine) -> list[Life]:
    ends = ((prompt, prompt + output) for prompt, output in engine.lengths)
    return [
        Life.without_events(prompt, end - 1, engine.block_size, engine.beside(end - 1))
        for prompt, end in ends
    ]


def _policies(engine: Engine, config: KVPolicyConfig) -> Iterator[tuple[str, ...]]:
    """Yield a line for the policy, then some for other budgets and intervals.

    Raises:
        ValueError: a policy without a budget, or no request fits the pool.
    """
    if config.resolved().info.keeps_all:
        raise ValueError(
            f"{config.policy} has no budget: what requests hold depends on their text"
        )
    yield _policy(engine, config)
    if config.budget_share:
        return
    for budget, interval in NEIGHBOURS:
        with suppress(ValueError):  # too small, or no room
            near = replace(
                config,
                budget_tokens=config.budget_tokens * budget // 4,
                interval_tokens=config.interval_tokens * interval // 4,
            )
            near.validate_block_size(engine.block_size)
            yield _policy(engine, near)


def _footprint(engine: Engine, config: KVPolicyConfig, whole: Life) -> Footprint:
    """Return when a request has events: at its floor as often as they can be called.

    Args:
        whole: its life without events.
    """
    block_size, rows = engine.block_size, sizes.query_rows(engine.vllm_config)
    prompt = whole.footprint.events.prompt_len
    lengths = prompt, whole.num_tokens + 1
    config = config.with_request(None, block_size, lengths) or config
    footprint = config.footprint(prompt, block_size, rows)
    if config.events != PRESSURE:
        return footprint
    plan = RequestPlan(config.policy, footprint, config.sink_tokens, is_called=True)
    spacing = RequestState(plan).spacing
    return replace(footprint, events=replace(footprint.events, interval=spacing))


def _pool_blocks(engine: Engine, config: KVPolicyConfig) -> int:
    """Return the superblocks of the pool, vLLM's null block included."""
    built = (assemble(each).needs for each in config.all_resolved)
    needs = reduce(or_, built, Needs(positions=config.hints))
    num_heads = engine.num_layers * engine.kv_heads[0]
    # The tables of a worker that grow with the pool, as it makes them.
    beside = SideTables.of_server(engine.vllm_config, config, needs, num_heads)
    superblock = engine.superblock_bytes(engine.is_fp8)
    return beside.pool_blocks(engine.available, superblock)


def _policy(engine: Engine, config: KVPolicyConfig) -> tuple[str, ...]:
    lives = [
        replace(
            whole,
            footprint=_footprint(engine, config, whole),
            is_spread=config.spread_events,
        )
        for whole in _whole(engine)
    ]
    usable = _pool_blocks(engine, config) - 1
    peak = max(life.peak for life in lives)
    if peak > usable:
        raise ValueError(
            f"{config.policy}: one request of these lengths holds up to {peak} "
            f"superblocks, and the pool has {max(usable, 0)}; give more memory, a "
            "smaller budget, or a smaller prefill_interval where prompts are long"
        )
    budget = str(config.budget_word if config.budget_share else config.budget_tokens)
    name = config.policy + ", FP8" * engine.is_fp8
    return name, budget, str(config.interval_tokens), *_numbers(lives, usable)


def _numbers(lives: list[Life], usable: int) -> tuple[str, ...]:
    steps = [life.num_tokens - life.first for life in lives]
    mean = sum(life.mean * num for life, num in zip(lives, steps, strict=True))
    after = [life.after_event for life in lives if life.after_event is not None]
    return (
        str(usable),
        str(max(life.peak for life in lives)),
        f"{mean / sum(steps):.1f}",
        str(max(after)) if after else "-",
        str(max(life.footprint.window_blocks for life in lives)),
        str(most_at_once(lives, usable)),
    )


# -- text around the table -----------------------------------------------------


def _title(engine: Engine) -> str:
    dtype = str(engine.model.dtype).removeprefix("torch.")
    lengths = ", ".join(f"{prompt} + {output}" for prompt, output in engine.lengths)
    kind = (
        "latent vectors" if engine.model.use_mla else f"{engine.kv_heads[0]} KV heads"
    )
    heads = f"{kind} of {engine.kv_heads[1]}"
    return (
        f"{engine.num_layers} layers, {heads}, {dtype}; {engine.available:,} bytes; "
        f"prompt + answer: {lengths} tokens"
    )


def _notes(
    engine: Engine, config: KVPolicyConfig, lines: list[tuple[str, ...]], own: int
) -> Iterator[str]:
    """Yield what a server would want besides, a line each.

    Args:
        own: place of the line of the policy as configured.
    """
    usable = lines[own][3]
    limit = engine.vllm_config.scheduler_config.max_num_seqs
    weights, count = weight_bytes(engine.model), min(int(lines[0][-1]), limit)
    # Under pressure nobody is cut at that number.
    if weights is not None and count and config.events != PRESSURE:
        whole = float(lines[0][5]) * engine.superblock_bytes(False)
        kept = float(lines[own][5]) * engine.superblock_bytes(engine.is_fp8)
        yield step_in_words(count, weights, whole, kept)
    if engine.others.count:
        yield (
            f"Superblocks of {engine.others.count} groups of other layers, which no "
            "policy bounds, are counted, but not what prompts hold in windows."
        )
    if engine.is_widened:
        yield (
            "In float32, because this CPU emulates bfloat16: give the server --dtype "
            "float32 too, or plan for another machine with --dtype bfloat16."
        )
    longest = max(map(sum, engine.lengths))
    if config.budget_tokens >= longest:
        yield (
            f"Nobody is ever cut: the longest request has {longest} tokens, the budget "
            f"is {config.budget_tokens}."
        )
    elif config.events == PRESSURE:
        yield (
            f"While at most {most_at_once(_whole(engine), int(usable))} run at "
            "once nobody is cut. Lines of the policy are of requests at their floors, "
            "cut as often as may be."
        )
    if max(int(line[-1]) for line in lines) > limit:
        yield f"More than {limit} at once need a higher --max-num-seqs."
    least = sizes.max_blocks_per_request(engine.vllm_config, config)
    least += engine.others.most_blocks(engine.model.max_model_len)
    if least > int(usable):
        yield (
            "A server would not start: a request of --max-model-len "
            f"{engine.model.max_model_len} may need {least} superblocks; lower it, or "
            "prefill_interval."
        )
