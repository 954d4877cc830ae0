"""What tests ask of the CPU, and a CPU with less for a run of them."""

import pytest

from vllm_kvpolicy import compat

needs_float8 = pytest.mark.skipif(
    not compat.reads_float8(),
    reason="vLLM 0.32's FP8 attention on a CPU needs AVX-512 or AMX",
)
