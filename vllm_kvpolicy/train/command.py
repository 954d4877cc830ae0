"""`vllm-kvpolicy train`: trains what an admission reads, from a model and texts."""

import argparse
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec

METHODS = {
    "wgkv": "write gates, which say what the model can do without",
    "dms": "a model, or an adapter, that decides which tokens to drop",
}


def main(arguments: Sequence[str]) -> None:
    """Run the trainer of one method.

    Raises:
        ValueError: a library is missing, or what the trainer refuses.
    """
    parser = argparse.ArgumentParser(
        prog="vllm-kvpolicy train", description="Train what an admission reads."
    )
    methods = parser.add_subparsers(dest="method", metavar="METHOD", required=True)
    for name, summary in METHODS.items():
        methods.add_parser(name, help=summary, add_help=False)
    method = parser.parse_args(arguments[:1]).method
    if find_spec("accelerate") is None:
        raise ValueError(
            "the trainers need accelerate, this package's extra `train`: pip install "
            "accelerate"
        )
    trainer = import_module(f"vllm_kvpolicy.train.{method}.command")
    trainer.main(arguments[1:])
