"""What differs from stock vLLM when its tests build our classes, and why."""

from tools.vllm_tests.compare import Expected

EXPECTED: tuple[Expected, ...] = ()
