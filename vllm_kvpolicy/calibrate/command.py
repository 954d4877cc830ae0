"""`vllm-kvpolicy calibrate`: measures what a scorer needs of a model."""

import argparse
from collections.abc import Sequence

from vllm_kvpolicy.calibrate import epikv_collect, epikv_labels, epikv_layers, queries

COMMANDS = (queries, epikv_collect, epikv_labels, epikv_layers)


def main(arguments: Sequence[str]) -> None:
    """Run one subcommand.

    Raises:
        OSError, ValueError: something that was given cannot be used.
    """
    parser = argparse.ArgumentParser(
        prog="vllm-kvpolicy calibrate",
        description="Measure a model for the scorers that need it: query statistics "
        "for qfilter and triattention, layers for epikv.",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for module in COMMANDS:
        module.add_commands(commands)
    given = parser.parse_args(arguments)
    given.run(given)
