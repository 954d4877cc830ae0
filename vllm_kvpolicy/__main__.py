"""The command line `vllm-kvpolicy`, also `python -m vllm_kvpolicy`.

It loads the module of the subcommand that is asked for and nothing else, so that help
and wrong words are answered at once.
"""

import argparse
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from vllm_kvpolicy import compat

PROGRAM = "vllm-kvpolicy"
HERE = Path(__file__).resolve().parent
WRONG, STOPPED = 2, 130  # exit statuses: as of argparse, and of a shell after Ctrl-C


@dataclass(frozen=True)
class Command:
    """A subcommand.

    Args:
        module: has `main`, which takes the words behind the subcommand and may return
            an exit status; in this package.
        summary: for the help.
    """

    module: str
    summary: str


COMMANDS = {
    "report": Command(
        "commands.report", "print versions, kernels, policies and refusals"
    ),
    "plan": Command("commands.plan", "say how many requests a KV cache bears at once"),
    "verify": Command("commands.verify", "check policies here, or a running server"),
    "trace": Command("commands.trace", "print or draw what the events of a trace kept"),
    "calibrate": Command("calibrate.command", "measure a model for a scorer"),
    "train": Command("train.command", "train write gates or drop decisions"),
}


def main(words: Sequence[str] | None = None) -> int:
    """Run a subcommand and return its exit status.

    Args:
        words: the command line without the program; that of the process by default.
    """
    words = sys.argv[1:] if words is None else words
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Bounded, well-chosen KV caches for vLLM: what surrounds "
        "`vllm serve MODEL --kv-policy NAME`.",
        epilog=f"`{PROGRAM} COMMAND --help` says more of each.",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        commands.add_parser(name, help=command.summary, add_help=False)
    name = parser.parse_args(words[:1]).command
    try:
        module = import_module(f"vllm_kvpolicy.{COMMANDS[name].module}")
        return module.main(list(words[1:])) or 0
    except (OSError, ValueError) as error:
        if compat.wants_traceback():
            raise
        reason = _in_a_line(error)
    except ModuleNotFoundError:
        missing = compat.missing_vllm()
        if missing is None:
            raise
        reason = missing
    except KeyboardInterrupt:
        return STOPPED
    print(f"{PROGRAM} {name}: error: {reason}", file=sys.stderr)
    return WRONG


def _in_a_line(error: Exception) -> str:
    """Return what an error says; with its place where no check of ours worded it.

    Such an error may be a fault of ours, found after hours. Errors of the system name
    their file.
    """
    reason = " ".join(str(error).split())
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if Path(frame.filename).is_relative_to(HERE)]
    place = ours[-1]
    is_worded = place is frames[-1] and (place.line or "").startswith("raise ")
    if is_worded or isinstance(error, OSError):
        return reason
    where = f"{Path(place.filename).relative_to(HERE)}:{place.lineno}"
    return (
        f"{reason or type(error).__name__} (from {where}; "
        f"{compat.TRACEBACK_VARIABLE}=1 shows more)"
    )


if __name__ == "__main__":
    sys.exit(main())
