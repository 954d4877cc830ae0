"""`python -m vllm_kvpolicy report`: what is installed here and what it can do."""

import sys

from vllm_kvpolicy.api import report

USAGE = "usage: python -m vllm_kvpolicy report"


def main(words: list[str]) -> int:
    """Run a command of the package and return its exit status.

    Args:
        words: the command line without the program.
    """
    if words != ["report"]:
        is_help = words in (["-h"], ["--help"])
        print(USAGE, file=sys.stdout if is_help else sys.stderr)
        return 0 if is_help else 2
    return report.main()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
