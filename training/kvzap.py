"""`python -m training kvzap`: trains surrogates that score tokens by hidden states.

The model reads a text, is asked to repeat it, and reads it again. The KVzip+ score of a
token says how much the repetition looks at it: attention, times the norm of what the
token's value adds to the residual stream, over the norm of what attention is given at
the query; the largest over the repetition and the query heads of a KV head. Surrogates
learn the logarithm of the scores from what attention is given at the token. Samples are
kept on disk, so that an interrupted run goes on.

Source: KVzap (arXiv 2601.07891) section 3, and `kvzap/data.py` and `kvzap/train.py` of
https://github.com/NVIDIA/kvpress at 0.5.5. Deviations: any texts, cut to a length,
where the authors sample a dataset of nine kinds; a text has the same tokens both times,
and a model without a chat template is asked in plain text. Surrogates are trained in
float32 and on all samples, the authors' MLP in the model's dtype on 95 % of them.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch.nn import Parameter
from tqdm import tqdm
from transformers import AttentionInterface, AutoTokenizer

from training import option
from training.model import Base, load_base
from training.options import add_device, add_model, check_numbers, device_of, dtype_of
from training.rows import Maker, Row, read_rows
from vllm_kvpolicy.policies.admissions.kvzap import (
    CONFIG_FILE,
    MODEL_TYPE,
    WEIGHTS_FILE,
    Surrogate,
    surrogate_scores,
)

NAME = "kvpolicy_repetition"  # of the attention function, in transformers
REQUEST = "\n\nRepeat the previous context exactly."
TEXT = "\x02"  # stands for the text in a rendered chat
KEPT = (0.75, 0.5, 0.375, 0.25, 0.125)
"""Shares of tokens for whose thresholds figures.json has a line."""
RIDGE = 1.0  # penalty of the linear surrogate's weights, scikit-learn's default
LARGEST_GRADIENT = 1.0  # gradients are clipped to this norm


@dataclass(frozen=True)
class Samples:
    """What surrogates learn from.

    Args:
        hidden: [N, L, d] in the model's dtype, what the layers' attention is given.
        scores: [N, L, H] float32, logarithms of KVzip+ scores.
    """

    hidden: torch.Tensor
    scores: torch.Tensor


@dataclass
class Repetition:
    """One pass over a text and its repetition.

    Args:
        text: the positions of the text.
        again: the positions of its repetition.
        chosen: [n] int64, tokens of the text whose samples are kept.
        given: what the layer's attention is given, [T, d]; written before each layer.
        samples: hidden states [n, d] and scores [n, H] of each layer, written.
    """

    text: slice
    again: slice
    chosen: torch.Tensor
    given: torch.Tensor = torch.empty(0)

    def __post_init__(self) -> None:
        self.samples: list[tuple[torch.Tensor, torch.Tensor]] = []

    def see(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
    ) -> None:
        """Add a layer's samples; see `attention`."""
        scores = repetition_scores(
            query[0, :, self.again],
            key[0, :, : self.again.stop],
            self.again.start,
            written_norms(value[0, :, self.text], module.o_proj.weight),
            self.given[self.again].float().norm(dim=-1),
            self.text,
            scaling,
        )
        chosen = self.given[self.text][self.chosen]
        self.samples.append((chosen.cpu(), scores[self.chosen].cpu()))


def written_norms(value: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the norms of what values add to the residual stream, by query head.

    Args:
        value: [H, T, D] floating point.
        weight: [d, Hq * D], of the output projection.

    Returns:
        [H, G, T] float32, for G = Hq / H.
    """
    heads, _, channels = value.shape
    by_head = weight.view(len(weight), heads, -1, channels).permute(1, 2, 3, 0)
    return (value[:, None] @ by_head.to(value.dtype)).float().norm(dim=-1)


def repetition_scores(
    query: torch.Tensor,
    key: torch.Tensor,
    first: int,
    written: torch.Tensor,
    norms: torch.Tensor,
    text: slice,
    scaling: float,
) -> torch.Tensor:
    """Return the logarithms of the KVzip+ scores of a text's tokens.

    Args:
        query: [Hq, R, D], of the repetition.
        key: [H, T, D], up to the end of the repetition.
        first: position of the first of the queries.
        written: [H, G, P], see `written_norms`, of the text.
        norms: [R] float32, norms of what the attention is given for the queries.
        text: positions of the text, P of them.

    Returns:
        [P, H] float32.
    """
    heads, tokens = key.shape[:2]
    grouped = query.unflatten(0, (heads, -1))  # [H, G, R, D]
    at = torch.arange(tokens, device=key.device)
    behind = at > first + torch.arange(query.shape[1], device=key.device)[:, None]
    most = torch.zeros(heads, written.shape[-1], device=key.device)
    for head in range(grouped.shape[1]):
        logits = (grouped[:, head] @ key.mT).float() * scaling
        weights = logits.masked_fill_(behind, -torch.inf).softmax(-1)[..., text]
        looked = (weights / norms[:, None]).amax(-2) * written[:, head]
        most = torch.maximum(most, looked)
    return most.clamp(min=torch.finfo(torch.float32).tiny).log().T


def attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    repetition: Repetition,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attend causally and show queries [1, Hq, T, D], keys and values [1, H, T, D]."""
    repetition.see(module, query, key, value, scaling)
    out = F.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=True
    )
    return out.transpose(1, 2), None


AttentionInterface.register(NAME, attention)


@dataclass(frozen=True)
class Reader:
    """Collects samples of texts.

    Args:
        before, between: token ids around the text and before its repetition.
        per_text: tokens of a text that become samples.
        seed: for the choice of these.
        kept: folder of the samples of texts, which is made.
    """

    base: Base
    before: list[int]
    between: list[int]
    per_text: int
    seed: int
    kept: Path

    def __post_init__(self) -> None:
        self.kept.mkdir(parents=True, exist_ok=True)
        self.base.model.set_attn_implementation(NAME)
        for layer in self.base.decoder.layers:
            layer.self_attn.register_forward_pre_hook(_tell, with_kwargs=True)

    def samples(self, rows: Sequence[Row], name: str) -> Samples:
        """Return the samples of texts, those on disk without reading them again."""
        found = [self._of_text(row) for row in tqdm(rows, desc=name, unit="text")]
        hidden, scores = (
            torch.cat([part[key] for part in found]) for key in ("hidden", "scores")
        )
        return Samples(hidden, scores)

    def _of_text(self, row: Row) -> dict[str, torch.Tensor]:
        base, ids = self.base, row.ids.tolist()
        read = [*self.before, *ids, *self.between, *ids]
        norm = base.decoder.norm.weight.tolist()  # other weights have another one
        told = f"{base.model.name_or_path} {base.dtype} {norm} {self.seed}"
        digest = sha256(f"{told} {self.per_text} {read}".encode()).hexdigest()
        file = self.kept / f"{digest}.safetensors"
        if not file.exists():
            fresh = file.with_suffix(".new")
            save_file(self._read(read, len(ids), int(digest[:8], 16)), fresh)
            fresh.replace(file)
        return load_file(file)

    @torch.no_grad()
    def _read(self, read: list[int], length: int, seed: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        chosen = torch.randperm(length, generator=generator)[: self.per_text]
        text = slice(len(self.before), len(self.before) + length)
        seen = Repetition(text, slice(len(read) - length, len(read)), chosen)
        ids = torch.tensor([read], device=self.base.device)
        self.base.decoder(ids, use_cache=False, repetition=seen)
        hidden, scores = zip(*seen.samples, strict=True)
        return {"hidden": torch.stack(hidden, 1), "scores": torch.stack(scores, 1)}


def _tell(module: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
    """Show what a layer's attention is given; a pre-hook."""
    named["repetition"].given = named["hidden_states"][0]


def around(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the token ids before a text, and between it and its repetition."""
    if not tokenizer.chat_template:
        return [], tokenizer(f"{REQUEST}\n\n", add_special_tokens=False).input_ids
    messages = [
        {"role": "user", "content": TEXT + REQUEST},
        {"role": "assistant", "content": TEXT},
    ]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False)
    before, between, _ = rendered.split(TEXT)
    ids = tokenizer([before, between], add_special_tokens=False).input_ids
    return ids[0], ids[1]


def linear(samples: Samples) -> dict[str, torch.Tensor]:
    """Return the tensors of a linear surrogate, by ridge regression of each layer."""
    tensors = {}
    for layer in range(samples.hidden.shape[1]):
        x, y = samples.hidden[:, layer].double(), samples.scores[:, layer].double()
        x_mean, y_mean = x.mean(0), y.mean(0)
        x -= x_mean
        penalty = RIDGE * torch.eye(x.shape[1], dtype=x.dtype)
        weight = torch.linalg.solve(x.T @ x + penalty, x.T @ (y - y_mean)).T
        tensors[f"layers.{layer}.weight"] = weight.float().contiguous()
        tensors[f"layers.{layer}.bias"] = (y_mean - weight @ x_mean).float()
    return tensors


def mlp(
    samples: Samples, given: argparse.Namespace, device: torch.device
) -> dict[str, torch.Tensor]:
    """Return the tensors of a surrogate with hidden units, all layers trained at once.

    AdamW with a rate that falls as a cosine over the epochs, and initial weights as
    torch's linear layers have.

    Args:
        given: the options.
    """
    count, layers, size = samples.hidden.shape
    heads, units, epochs = samples.scores.shape[-1], given.hidden_units, given.epochs
    generator = torch.Generator().manual_seed(given.seed)

    def uniform(inputs: int, *shape: int) -> Parameter:
        drawn = torch.rand(layers, *shape, generator=generator)
        return Parameter(((2 * drawn - 1) * inputs**-0.5).to(device))

    first, first_bias = uniform(size, units, size), uniform(size, 1, units)
    second, second_bias = uniform(units, heads, units), uniform(units, 1, heads)
    weights = first, first_bias, second, second_bias
    optimizer = torch.optim.AdamW(weights, lr=given.learning_rate)
    falling = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    with tqdm(total=epochs, desc="mlp", unit="epoch") as shown:
        for _ in range(epochs):
            losses = []
            for some in torch.randperm(count, generator=generator).split(given.batch):
                x, y = samples.hidden[some].to(device), samples.scores[some].to(device)
                inner = F.gelu(x.float().transpose(0, 1) @ first.mT + first_bias)
                loss = F.mse_loss(inner @ second.mT + second_bias, y.transpose(0, 1))
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(weights, LARGEST_GRADIENT)
                optimizer.step()
                losses.append(loss.detach())
            falling.step()
            shown.set_postfix(loss=f"{torch.stack(losses).mean():.4f}")
            shown.update()
    parts = {"0.weight": first, "0.bias": first_bias[:, 0]}
    parts |= {"2.weight": second, "2.bias": second_bias[:, 0]}
    return {
        f"layers.{layer}.{name}": part[layer].detach().cpu().contiguous()
        for layer in range(layers)
        for name, part in parts.items()
    }


def figures_of(surrogate: Surrogate, samples: Samples) -> dict[str, Any]:
    """Return how well scores are predicted, and which thresholds keep which share.

    Returns:
        `r2`: share of the scores' variance over tokens that is explained, mean over
        heads and layers; `r2_by_layer`; `thresholds`: kept share of the tokens outside
        the window -> threshold, over all heads.
    """
    layers = range(surrogate.num_layers)
    found = torch.stack(
        [
            surrogate_scores(samples.hidden[:, layer].float(), surrogate.linears(layer))
            for layer in layers
        ],
        1,
    )
    wanted = samples.scores
    missed = (found - wanted).square().mean(0) / wanted.var(0, unbiased=False)
    ordered = found.flatten().sort().values
    places = [(share, int((1 - share) * (len(ordered) - 1))) for share in KEPT]
    return {
        "r2": 1 - missed.mean().item(),
        "r2_by_layer": (1 - missed.mean(1)).tolist(),
        "thresholds": {str(share): ordered[at].item() for share, at in places},
    }


def write(surrogate: Surrogate, folder: Path) -> None:
    """Write a surrogate as kvpress does; see `vllm_kvpolicy...kvzap.load`."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "model_type": MODEL_TYPE,
        "n_modules": surrogate.num_layers,
        "input_dim": surrogate.hidden_size,
        "output_dim": surrogate.num_kv_heads,
        "hidden_dim": surrogate.num_units,
    }
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")
    save_file(dict(surrogate.tensors), folder / WEIGHTS_FILE)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options; a wrong one ends the process."""
    parser = argparse.ArgumentParser(
        prog="python -m training kvzap",
        description="Train surrogates (KVzap), one linear and one with hidden units. "
        "The defaults are the authors'. The same command goes on with an interrupted "
        "run.",
    )
    add_model(parser)
    told = 'UTF-8 text, or .jsonl with one {"text": ...} object per line'
    parser.add_argument("--text", type=Path, required=True, help=told)
    option(parser, "--length", int, 1250, "tokens of a text, at most")
    option(parser, "--shortest", int, 750, "skip shorter lines of .jsonl")
    option(parser, "--texts", int, 4500, "texts to read, at most")
    option(parser, "--validation-rows", int, 45, "further texts, to measure with")
    option(parser, "--tokens-per-text", int, 500, "tokens of a text that are samples")
    option(parser, "--hidden-units", int, 512, "hidden units of a layer's surrogate")
    option(parser, "--epochs", int, 15, "passes over the samples")
    option(parser, "--batch", int, 512, "samples per optimiser step")
    option(parser, "--learning-rate", float, 5e-3, "first learning rate")
    option(parser, "--seed", int, 42, "random seed of samples and initial weights")
    add_device(parser)
    given = parser.parse_args(arguments)
    check_numbers(parser, given)
    if given.shortest < given.tokens_per_text:
        told = f"shortest: got {given.shortest}, expected at least --tokens-per-text"
        parser.error(f"{told} {given.tokens_per_text}")
    return given


def surrogates_of(
    base: Base, samples: Samples, given: argparse.Namespace
) -> Iterator[tuple[str, Surrogate]]:
    """Yield the kinds of surrogates, trained."""
    shape = base.num_layers, base.hidden_size, base.num_kv_heads
    yield "linear", Surrogate(*shape, None, linear(samples))
    yield "mlp", Surrogate(*shape, given.hidden_units, mlp(samples, given, base.device))


def main(arguments: Sequence[str]) -> None:
    """Run the command.

    Raises:
        OSError, ValueError: something that was given cannot be used.
    """
    given = parse(arguments)
    if given.threads:
        torch.set_num_threads(given.threads)
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    maker = Maker(tokenizer, given.length, "", shortest=given.shortest)
    rows = read_rows(given.text, maker, given.validation_rows)
    base = load_base(given.model, device_of(given), dtype_of(given))
    how = given.tokens_per_text, given.seed, given.output / "samples"
    reader = Reader(base, *around(tokenizer), *how)
    held_out = reader.samples(rows.validation, "validation")
    texts = rows.training[: given.texts]
    samples = reader.samples(texts, "texts")
    content: dict[str, Any] = {"model": given.model, "texts": len(texts)}
    for kind, surrogate in surrogates_of(base, samples, given):
        write(surrogate, given.output / kind)
        content[kind] = figures_of(surrogate, held_out)
        print(f"{kind}: R2 {content[kind]['r2']:.3f}; wrote {given.output / kind}")
    (given.output / "figures.json").write_text(json.dumps(content, indent=2) + "\n")
