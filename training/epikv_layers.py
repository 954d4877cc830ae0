"""`python -m training epikv-layers`: finds layers whose steps predict important tokens.

Computes Spearman's rank correlation of each layer's step, averaged over 64 tokens, with
the labels. One band of layers correlates positively, another negatively.

Source: EpiKV (arXiv 2606.26472) section 3 and
https://github.com/stevenkolawole/epiphany-kv-cache/blob/d424208/scripts/signal_ablation.py.
Deviations: bands are computed instead of read off a plot. A band is the run of
neighbouring layers with the largest sum of correlations, all of one sign in every fold
of the traces. Its weight is its mean correlation (theirs: that of one layer).
"""

import argparse
import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from training import option
from training.epikv_files import STEP_SIGNAL, Trace, read_lines
from vllm_kvpolicy.commands.outputs import new_file
from vllm_kvpolicy.policies.scorers._signals import rolling_mean

COLUMNS = ("signal", "spearman_rho", "stable", "n_pairs")


@dataclass(frozen=True)
class Correlation:
    """How one signal correlates with the labels.

    Args:
        rho: Spearman's rank correlation over the tokens of all traces.
        folds: the same for each part of the traces.
    """

    rho: float
    folds: tuple[float, ...]
    num_pairs: int

    @property
    def is_stable(self) -> bool:
        """Whether every fold has the sign of the whole."""
        return all(np.sign(fold) == np.sign(self.rho) for fold in self.folds)


def spearman(first: np.ndarray, second: np.ndarray) -> float:
    """Return the correlation of ranks; equal values share their mean rank.

    Args:
        first: [n] numbers.
        second: [n] numbers.

    Returns:
        Between -1 and 1; NaN where either is constant.
    """
    ranks = [_ranks(values) for values in (first, second)]
    centred = [rank - rank.mean() for rank in ranks]
    norm = np.sqrt((centred[0] ** 2).sum() * (centred[1] ** 2).sum())
    return float((centred[0] * centred[1]).sum() / norm) if norm else float("nan")


def _ranks(values: np.ndarray) -> np.ndarray:
    """Return ranks from 1 on: [5, 7, 7] has ranks [1, 2.5, 2.5]."""
    _, group, size = np.unique(values, return_inverse=True, return_counts=True)
    last_rank = np.cumsum(size)
    return (last_rank - (size - 1) / 2)[group]


def correlate(
    traces: Sequence[Trace], window: int, num_folds: int
) -> dict[str, Correlation]:
    """Correlate every signal with the labels of generated tokens.

    Args:
        traces: with `signals` and `importance`.
        window: tokens averaged over, up to and including the current one.
        num_folds: parts of the traces; part i has traces i, i + num_folds and so on.

    Raises:
        ValueError: no traces, or signals and labels differ in length.
    """
    if not traces:
        raise ValueError("traces: no trace has both signals and importance")
    names = sorted(set.intersection(*(set(trace["signals"]) for trace in traces)))
    labels = [_generated(trace, trace["importance"]) for trace in traces]
    found = {}
    for name in names:
        signals = [_smoothed(trace, name, window) for trace in traces]
        folds = [
            spearman(np.concatenate(signals[fold::num_folds]), np.concatenate(part))
            for fold in range(min(num_folds, len(traces)))
            if (part := labels[fold::num_folds])
        ]
        whole = np.concatenate(labels)
        rho = spearman(np.concatenate(signals), whole)
        found[name] = Correlation(rho, tuple(folds), len(whole))
    return found


def _generated(trace: Trace, values: Any) -> np.ndarray:
    """Return the values at generated tokens that have a label."""
    importance = np.asarray(trace["importance"])
    if len(values) != len(importance):
        raise ValueError(
            f"signals: got {len(values)} values for {len(importance)} labelled tokens"
        )
    is_counted = importance >= 0
    is_counted[: trace["prompt_len"]] = False
    return np.asarray(values)[is_counted]


def _smoothed(trace: Trace, name: str, window: int) -> np.ndarray:
    row = torch.tensor(trace["signals"][name], dtype=torch.float64)[None]
    mean = rolling_mean(row, torch.zeros(1, dtype=torch.int64), window)
    return _generated(trace, mean[0].numpy())


def find_band(rhos: Mapping[int, Correlation], sign: int) -> tuple[int, int] | None:
    """Return the first and last layer of the band of one sign, None if there is none.

    Args:
        rhos: correlations by layer.
        sign: 1 or -1.
    """
    runs: list[list[int]] = []
    for layer in sorted(rhos):
        if not rhos[layer].is_stable or np.sign(rhos[layer].rho) != sign:
            continue
        if runs and runs[-1][-1] == layer - 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    if not runs:
        return None
    strongest = max(runs, key=lambda run: sum(abs(rhos[layer].rho) for layer in run))
    return strongest[0], strongest[-1]


def proposals(found: Mapping[str, Correlation]) -> list[dict[str, Any]]:
    """Return two values of `--kv-policy-config`: single layers, and bands.

    Raises:
        ValueError: no layer correlates positively, or none negatively.
    """
    steps = {
        int(name.removeprefix(STEP_SIGNAL)): correlation
        for name, correlation in found.items()
        if name.startswith(STEP_SIGNAL)
    }
    bands = {name: find_band(steps, sign) for name, sign in (("a", 1), ("b", -1))}
    if None in bands.values():
        missing = ", ".join(name for name, band in bands.items() if band is None)
        raise ValueError(
            f"band {missing}: no layer correlates with a stable sign, so EpiKV "
            "cannot score tokens by this model's hidden states; label more traces, "
            "or use the variant kv-key or kv-val"
        )
    single: dict[str, Any] = {"variant": "detrend"}
    band: dict[str, Any] = {"variant": "band"}
    strength = {}
    for name, ends in bands.items():
        first, last = ends or (0, 0)
        middle = (first + last) // 2
        single |= {f"{name}_first": middle, f"{name}_last": middle}
        band |= {f"{name}_first": first, f"{name}_last": last}
        rhos = [abs(steps[layer].rho) for layer in range(first, last + 1)]
        strength[name] = sum(rhos) / len(rhos)
    return [single, {**band, "a_weight": round(strength["a"] / strength["b"], 4)}]


def write_table(path: Path, found: Mapping[str, Correlation]) -> None:
    """Write correlations as CSV, strongest first."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for name, row in sorted(found.items(), key=lambda item: -abs(item[1].rho)):
            writer.writerow([name, row.rho, row.is_stable, row.num_pairs])


def join(traces: Sequence[Trace], labels: Sequence[Trace]) -> list[Trace]:
    """Return the traces that have signals and labels, with both in one object."""
    importance = {
        tuple(line["token_ids"]): line["importance"]
        for line in labels
        if "importance" in line
    }
    return [
        {**trace, "importance": importance[tuple(trace["token_ids"])]}
        for trace in traces
        if "signals" in trace and tuple(trace["token_ids"]) in importance
    ]


def main(arguments: Sequence[str]) -> None:
    """Print correlations by signal and the values of `--kv-policy-config`."""
    parser = argparse.ArgumentParser(
        prog="python -m training epikv-layers",
        description="Find the layers whose change correlates with the labels, and "
        "print values of --kv-policy-config for epikv.",
    )
    add = parser.add_argument
    add("--traces", required=True, type=Path, help="JSONL from epikv-collect")
    add("--labels", required=True, type=Path, help="JSONL from epikv-labels")
    add("--output", type=new_file, help="CSV of all correlations to write")
    option(parser, "--window", int, 64, "tokens per rolling average")
    told = "number of folds whose correlations must agree in sign"
    option(parser, "--folds", int, 4, told)
    given = parser.parse_args(arguments)
    try:
        traces = join(read_lines(given.traces), read_lines(given.labels))
        found = correlate(traces, given.window, given.folds)
        if given.output is not None:
            write_table(given.output, found)
            print(f"wrote {given.output}: correlations of {len(traces)} traces")
        for name, row in found.items():
            print(f"{name:24} {row.rho:+.3f}{'' if row.is_stable else '  not stable'}")
        for choice in proposals(found):
            print(f"--kv-policy-config '{json.dumps(choice)}'")
    except ValueError as error:
        parser.error(str(error))
