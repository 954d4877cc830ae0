"""The command line `vllm-kvpolicy`, also `python -m vllm_kvpolicy`.

It loads the module of the subcommand that is asked for and nothing else, so that help
and wrong words are answered at once.
"""

import argparse
import sys
import traceback
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from vllm_kvpolicy import compat

PROGRAM = "vllm-kvpolicy"
HERE = Path(__file__).resolve().parent
WRONG, STOPPED = 2, 130  # exit statuses: as of argparse, and of a shell after Ctrl-C


class Command(NamedTuple):
    """A module with `main`, or the function named behind a colon, and its summary.

    It takes the words behind the subcommand and may return an exit status.
    """

    module: str
    summary: str


COMMANDS = {
    "report": Command(
        "commands.report", "print versions, kernels, policies and refusals"
    ),
    "plan": Command("commands.plan", "say how many requests a KV cache bears at once"),
    "verify": Command("commands.verify", "check policies here, or a running server"),
    "top": Command("commands.top", "show in a terminal what a running server does"),
    "trace": Command("commands.trace", "print or draw what the events of a trace kept"),
}
# Commands that only a checkout has, in `training`.
MOVED = ("train", "calibrate")


def main(words: Sequence[str] | None = None) -> int:
    """Run a subcommand of `words`, by default the process's; return its exit status."""
    words = sys.argv[1:] if words is None else words
    if words and words[0] in MOVED:
        told = "run `python -m training` in a checkout of the repository"
        print(f"{PROGRAM} {words[0]}: error: {told}", file=sys.stderr)
        return WRONG
    description = (
        "Bounded, well-chosen KV caches for vLLM: what surrounds "
        "`vllm serve MODEL --kv-policy NAME`."
    )
    return run(PROGRAM, "vllm_kvpolicy", description, COMMANDS, words)


def run(
    program: str,
    package: str,
    description: str,
    known: Mapping[str, Command],
    words: Sequence[str],
) -> int:
    """Run the subcommand that the first word names, and return its exit status.

    Args:
        package: has the modules of the subcommands; lies beside this one.
    """
    parser = argparse.ArgumentParser(
        prog=program,
        description=description,
        epilog=f"`{program} COMMAND --help` says more of each.",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in known.items():
        commands.add_parser(name, help=command.summary, add_help=False)
    name = parser.parse_args(words[:1]).command
    module, _, function = known[name].module.partition(":")
    try:
        called = getattr(import_module(f"{package}.{module}"), function or "main")
        return called(list(words[1:])) or 0
    except (OSError, ValueError) as error:
        if compat.wants_traceback():
            raise
        reason = _in_a_line(error, (HERE, HERE.parent / package))
    except ModuleNotFoundError:
        reason = compat.missing_vllm() or ""
        if not reason:
            raise
    except KeyboardInterrupt:
        return STOPPED
    print(f"{program} {name}: error: {reason}", file=sys.stderr)
    return WRONG


def _in_a_line(error: Exception, homes: Sequence[Path]) -> str:
    """Return what an error says, with its place where it may be a fault of ours.

    Such is what no check of ours worded; errors of the system name their file.
    """
    reason = " ".join(str(error).split())
    frames = traceback.extract_tb(error.__traceback__)
    home, place = [
        (home, frame)
        for frame in frames
        for home in homes
        if Path(frame.filename).is_relative_to(home)
    ][-1]
    is_worded = place is frames[-1] and (place.line or "").startswith("raise ")
    if is_worded or isinstance(error, OSError):
        return reason
    where = f"{Path(place.filename).relative_to(home)}:{place.lineno}"
    return (
        f"{reason or type(error).__name__} (from {where}; "
        f"{compat.TRACEBACK_VARIABLE}=1 shows more)"
    )


if __name__ == "__main__":
    sys.exit(main())
