"""The order in which two processes share the test files: the dearest first.

A process takes the next file when it is done with one. Were a file of minutes the last
to be taken, the other process would have nothing to do meanwhile.
"""

from pathlib import Path

from xdist.scheduler import LoadFileScheduling

TESTS = Path(__file__).parents[1]
# Files of more than half a minute of one core, the dearest first.
DEAREST = (
    "engine/test_tensor_parallel.py",
    "reasoner/test_training.py",
    "kernels/test_under_the_interpreter.py",
    "engine/test_scheduler_simulation.py",
    "v2_runner/test_v2_runner.py",
    "benchmarks/test_soak.py",
    "engine/test_prefix_caching.py",
    "engine/test_oracles.py",
    "engine/test_speculation.py",
    "engine/test_combinations.py",
    "engine/test_float8.py",
    "engine/test_float8_admissions.py",
    "engine/test_identity.py",
    "engine/test_sliding_together.py",
    "engine/test_sliding_prefixes.py",
    "engine/test_sliding_simulation.py",
    "engine/test_sliding_identity.py",
    "engine/test_sliding_memory.py",
    "engine/test_sinks.py",
    "engine/test_dms.py",
    "engine/test_admitted_tokens.py",
    "engine/test_features.py",
    "engine/test_rotations.py",
    "engine/test_text_only.py",
    "engine/test_lora.py",
    "engine/test_rollouts.py",
    "engine/test_compiled.py",
    "engine/test_plumbing_oracle.py",
    "engine/test_rules.py",
    "serve/test_two_nodes.py",
    "serve/test_http.py",
    "serve/test_data_parallel.py",
    "serve/test_live.py",
    "serve/test_live_pictures.py",
    "serve/test_one_server.py",
    "serve/test_every_name.py",
    "serve/test_released_dms.py",
    "engine/test_verify.py",
    "engine/test_ragged.py",
    "engine/test_oracle_mutations.py",
    "engine/test_plumbing_mutations.py",
    "engine/test_requests.py",
    "gpu/test_gpu_check.py",
    "kernels/test_triton_compiles.py",
    "csrc/test_sources_compile.py",
    "engine/test_hidden_states.py",
    "engine/test_processes.py",
    "engine/test_counting.py",
    "benchmarks/test_gpu_bench.py",
    "engine/test_quest.py",
    "observe/test_page.py",
    "benchmarks/test_gpu_rehearsal.py",
    "scripts/test_notebook.py",
    "scripts/test_wheel.py",
    "engine/test_live_ranks.py",
    "serve/test_two_servers.py",
    "engine/test_async_scheduling.py",
)
# Their tests share nothing, so that each may run in either process.
APART = ("kernels/test_under_the_interpreter.py", "engine/test_scheduler_simulation.py")


class ByFile(LoadFileScheduling):
    """Gives a process a file at a time, and of some files a test at a time."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return nodeid if file.endswith(APART) else file


def rank(path: Path) -> int:
    """Return the place of a test file among the dearest; all others come after them."""
    name = path.relative_to(TESTS).as_posix() if path.is_relative_to(TESTS) else ""
    return DEAREST.index(name) if name in DEAREST else len(DEAREST)
