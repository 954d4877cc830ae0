"""The command line `python -m training`, in a checkout."""

import sys
from collections.abc import Sequence
from importlib.util import find_spec

from vllm_kvpolicy.__main__ import WRONG, Command, run

PROGRAM = "python -m training"
TRAINERS = {
    "wgkv": Command("wgkv", "train write gates"),
    "dms": Command("dms", "train a model, or an adapter, to drop tokens"),
    "duo": Command("duo", "find the KV heads that need the full cache"),
    "kvzap": Command("kvzap", "train surrogates that score tokens"),
}
COMMANDS = TRAINERS | {
    "qfilter": Command("queries:qfilter", "measure queries for qfilter"),
    "triattention": Command("queries:triattention", "measure queries for triattention"),
    "epikv-collect": Command(
        "epikv_traces:collect_main",
        "step 1 for epikv: answer problems and record how each layer's output changes",
    ),
    "epikv-labels": Command(
        "epikv_traces:labels_main",
        "step 2 for epikv: find the tokens that answers depend on",
    ),
    "epikv-layers": Command(
        "epikv_layers", "step 3 for epikv: find the layers to read"
    ),
}
DESCRIPTION = "Make what policies read of a model: gates, adapters, calibration files."


def main(words: Sequence[str] | None = None) -> int:
    """Run a subcommand and return its exit status; see `vllm_kvpolicy.__main__`."""
    words = sys.argv[1:] if words is None else words
    if words and words[0] in TRAINERS and find_spec("accelerate") is None:
        told = "the trainers need accelerate: pip install accelerate"
        print(f"{PROGRAM} {words[0]}: error: {told}", file=sys.stderr)
        return WRONG
    return run(PROGRAM, "training", DESCRIPTION, COMMANDS, words)


if __name__ == "__main__":
    sys.exit(main())
