"""Commands: `report`, what is installed here, and `plan`, what a KV cache bears."""

import sys

from vllm_kvpolicy.api import plan, report

USAGE = """usage: python -m vllm_kvpolicy report
       python -m vllm_kvpolicy plan MODEL --kv-policy NAME [OPTIONS], or plan --help"""


def main(words: list[str]) -> int:
    """Run a command of the package and return its exit status.

    Args:
        words: the command line without the program.
    """
    if words == ["report"]:
        return report.main()
    if words[:1] == ["plan"]:
        return plan.main(words[1:])
    is_help = words in (["-h"], ["--help"])
    print(USAGE, file=sys.stdout if is_help else sys.stderr)
    return 0 if is_help else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
