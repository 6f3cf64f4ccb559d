# Needs Python 3.11 with venv and pip, nothing else. See requirements/ for what goes into the environment.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
UV := $(shell command -v uv 2>/dev/null)

# Where the CPU build of torch comes from: pip's find-links where they are configured, else PyTorch's own CPU index.
LINKS := $(or $(PIP_FIND_LINKS),$(shell $(PYTHON) -m pip config get global.find-links 2>/dev/null))
TORCH := $(if $(LINKS),$(foreach link,$(LINKS),--find-links $(link)),--torch-backend=cpu)

# Without bytecode every worker process compiles verl, vLLM and torch again.
unexport PYTHONDONTWRITEBYTECODE
export OMP_NUM_THREADS ?= 1

.PHONY: help env demo test lint bench clean

help:
	@echo "make env    the CPU environment in $(VENV)"
	@echo "make demo   a small training run on two cores, with its report"
	@echo "make test   lint, unit tests and tests on real engines"
	@echo "make lint   ruff, mypy, layers"
	@echo "make bench  the benchmarks; writes benchmarks/results"
	@echo "make clean  removes the environment and caches"

env: $(STAMP)

$(STAMP): pyproject.toml requirements/cpu.txt requirements/cpu-overrides.txt
	@test -x $(BIN)/python || { if [ -n "$(UV)" ]; then "$(UV)" venv --quiet --python $(PYTHON) $(VENV); \
	  else $(PYTHON) -m venv $(VENV); fi; }
	@test -n "$(UV)" || test -x $(BIN)/uv || $(BIN)/python -m pip install --quiet uv
	UV="$(UV)"; "$${UV:-$(BIN)/uv}" pip install --quiet --python $(BIN)/python --compile-bytecode $(TORCH) \
	  --overrides requirements/cpu-overrides.txt -r requirements/cpu.txt -e '.[dev,sim]'
	@touch $@

demo: env
	PATH="$(abspath $(BIN)):$$PATH" bash recipes/quickstart/run.sh

lint: env
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint
	$(BIN)/python -m pytest -q -m "not gpu and not slow"

bench: env
	PATH="$(abspath $(BIN)):$$PATH" python benchmarks/deployments_cpu.py
	PATH="$(abspath $(BIN)):$$PATH" python benchmarks/deployments_cpu.py --share 0.35 \
	  --out benchmarks/results/deployments_cpu_share035.json
	PATH="$(abspath $(BIN)):$$PATH" python benchmarks/deployments_cpu.py --planners --repeat 2
	PATH="$(abspath $(BIN)):$$PATH" python benchmarks/simulator_fidelity.py
	PATH="$(abspath $(BIN)):$$PATH" python benchmarks/simulated_cluster.py
	PATH="$(abspath $(BIN)):$$PATH" python benchmarks/simulated_sensitivity.py
	PATH="$(abspath $(BIN)):$$PATH" python benchmarks/simulated_random.py
	PATH="$(abspath $(BIN)):$$PATH" python benchmarks/length_prediction.py
	PATH="$(abspath $(BIN)):$$PATH" python benchmarks/render.py

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .import_linter_cache .hypothesis
