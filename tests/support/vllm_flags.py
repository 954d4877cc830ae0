"""The flags of `vllm serve` with the plugin installed."""

from argparse import Namespace

from vllm.entrypoints.cli.serve import make_arg_parser
from vllm.plugins import load_general_plugins
from vllm.utils.argparse_utils import FlexibleArgumentParser


def serve_flags(words: list[str]) -> Namespace:
    """Return what `vllm serve` makes of the words behind it; all have to be known."""
    load_general_plugins()
    parser = make_arg_parser(FlexibleArgumentParser(exit_on_error=False))
    args, unknown = parser.parse_known_args(words)
    assert not unknown
    assert args.model_tag == words[0]
    return args
