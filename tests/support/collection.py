"""The order in which two processes share the test files: the dearest first.

A process takes the next file when it is done with one. Were a file of minutes the last
to be taken, the other process would have nothing to do meanwhile.
"""

from pathlib import Path

from xdist.scheduler import LoadFileScheduling

TESTS = Path(__file__).parents[1]
# Files of more than half a minute, the dearest first; some are dear in `make test-all`.
DEAREST = (
    "reasoner/test_training.py",
    "serve/test_one_server.py",
    "benchmarks/test_soak.py",
    "kernels/test_under_the_interpreter.py",
    "engine/test_scheduler_simulation.py",
    "engine/test_tensor_parallel.py",
    "v2_runner/test_v2_runner.py",
    "engine/test_float8.py",
    "engine/test_combinations.py",
    "serve/test_http.py",
    "serve/test_live.py",
    "serve/test_two_nodes.py",
    "serve/test_data_parallel.py",
    "engine/test_dms.py",
    "engine/test_speculation.py",
    "engine/test_features.py",
    "csrc/test_sources_compile.py",
    "engine/test_prefix_caching.py",
    "engine/test_oracles.py",
    "engine/test_layers_that_draft.py",
    "engine/test_sliding_replay.py",
    "engine/test_sliding_prefixes.py",
    "worker/test_event_chain.py",
    "engine/test_quest.py",
    "engine/test_admitted_tokens.py",
    "engine/test_identity.py",
    "engine/test_ragged.py",
    "engine/test_lora.py",
    "engine/test_rules.py",
    "block_manager/test_admission_lengths.py",
    "benchmarks/test_gpu_bench.py",
    "worker/test_launch_variants.py",
    "observe/test_page_waits.py",
)
# Their tests share nothing, so that each may run in either process.
APART = ("kernels/test_under_the_interpreter.py", "engine/test_scheduler_simulation.py")
# These share a server.
TOGETHER = ("serve/test_http.py", "serve/test_live.py")


class ByFile(LoadFileScheduling):
    """Gives a process a file at a time, of some a test at a time, and two at once."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        if file.endswith(TOGETHER):
            return TOGETHER[0]
        return nodeid if file.endswith(APART) else file


def rank(path: Path) -> int:
    """Return the place of a test file among the dearest; all others come after them."""
    name = path.relative_to(TESTS).as_posix() if path.is_relative_to(TESTS) else ""
    return DEAREST.index(name) if name in DEAREST else len(DEAREST)
