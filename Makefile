# Each target does all the set-up it needs, in a virtual environment of its own.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo demo-torchft test lint benchmark clean

demo: $(VENV)/.ready
	$(BIN)/ftcoord demo

demo-torchft: $(VENV)/.torchft
	$(BIN)/python examples/torchft_demo.py

test: $(VENV)/.ready
	$(BIN)/python -m pytest -q -n 4 --dist worksteal

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

benchmark: $(VENV)/.ready
	$(BIN)/pip install -q python-etcd urllib3
	$(BIN)/python -m benchmarks.rendezvous --write docs/benchmarks.md
	$(BIN)/python -m benchmarks.store --write docs/benchmarks.md
	$(BIN)/python -m benchmarks.quorum --write docs/benchmarks.md
	$(BIN)/python -m benchmarks.timers --write docs/benchmarks.md

$(VENV)/.ready: setup.cfg pyproject.toml tests/constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c tests/constraints.txt -e '.[torch,test,lint]'
	touch $@

$(VENV)/.torchft: $(VENV)/.ready
	$(BIN)/pip install -q -c tests/constraints.txt -e '.[torchft]'
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
