.POSIX:
.PHONY: help demo test test-all lint format clean setup-demo setup-dev

PY = .venv/bin/python
TEST_JOBS = 2

help:
	@echo "make demo      set up what is missing, train the small hybrid through its three stages, report (runs/demo)"
	@echo "make test      set up what is missing, lint, type check, every test without a GPU that is not long"
	@echo "make test-all  the same with the long tests"
	@echo "make lint      ruff and mypy"
	@echo "make format    let ruff rewrite the files"
	@echo "make clean     remove caches and build output; keeps .venv and runs"

demo: setup-demo
	@$(PY) -m megatron_palimpsa demo

test: lint
	OMP_NUM_THREADS=1 $(PY) -m pytest -m "not long" -n $(TEST_JOBS) --timeout 300

test-all: lint
	OMP_NUM_THREADS=1 $(PY) -m pytest -n $(TEST_JOBS) --timeout 1800

lint: setup-dev
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m mypy

format: setup-dev
	$(PY) -m ruff check --fix
	$(PY) -m ruff format

clean:
	rm -rf build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +

setup-demo:
	@PYTHON="$(PYTHON)" sh launch/setup/setup.sh demo

setup-dev:
	@PYTHON="$(PYTHON)" sh launch/setup/setup.sh dev
