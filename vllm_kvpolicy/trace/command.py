"""`vllm-kvpolicy trace`: a table and figures of what events kept."""

import argparse
from collections.abc import Sequence

from vllm_kvpolicy.trace import plot, report

COMMANDS = (report, plot)


def main(arguments: Sequence[str]) -> None:
    """Run one subcommand."""
    parser = argparse.ArgumentParser(
        prog="vllm-kvpolicy trace",
        description="Show what the events of a trace kept.",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for module in COMMANDS:
        module.add_command(commands)
    given = parser.parse_args(arguments)
    given.run(given)
