# Two commands do everything on a machine that has only Python >= 3.11 and make:
#   make serve    builds .venv, serves the packaged model, prints how to call it
#   make test     builds .venv, runs the tests
# make test-all also serves every policy of the catalogue, one server each.
PYTHON ?= python3
PORT ?= 8000
HOST ?= 127.0.0.1
POLICY ?= ams-tova
BUDGET ?= 512
INTERVAL ?= 64
MODEL ?= reasoner/checkpoint
# More arguments for `vllm serve` and for pytest.
ARGS ?=

.PHONY: serve test test-all lint format docs setup clean
.DEFAULT_GOAL := setup

setup:
	@command -v $(PYTHON) >/dev/null || { \
		echo "set-up failed: no $(PYTHON) on PATH, install Python >= 3.11" >&2; \
		exit 1; }
	@$(PYTHON) scripts/setup_env.py

serve: setup
	@.venv/bin/python scripts/serve.py --model '$(MODEL)' --host $(HOST) \
		--port $(PORT) --policy '$(POLICY)' --budget $(BUDGET) \
		--interval $(INTERVAL) -- $(ARGS)

test: setup
	@.venv/bin/python -m pytest $(ARGS)

test-all: setup
	@.venv/bin/python -m pytest --every-name $(ARGS)

lint: setup
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@.venv/bin/mypy

format: setup
	@.venv/bin/ruff check --fix .
	@.venv/bin/ruff format .

docs: setup
	@.venv/bin/python scripts/write_support.py

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
