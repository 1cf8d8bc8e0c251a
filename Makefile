# Each target does all the set-up it needs, in a virtual environment of its own.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

# Else hundreds of processes would each compile all of ftcoord, and each of pytest's workers all tests.
unexport PYTHONDONTWRITEBYTECODE

# The files with tests of a mark, but for tests/cluster, which has a run of its own: to collect all 4,300 tests for a dozen
# takes each process ten seconds.
marked = $$(grep -rlw --include='test_*.py' --exclude-dir=cluster 'mark.$(1)' tests)

.PHONY: demo demo-torchft test test-browser test-cluster test-elastic pictures sim sim-shrink soak etcd-image lint benchmark
.PHONY: docs clean

demo: $(VENV)/.ready
	$(BIN)/ftcoord demo

demo-torchft: $(VENV)/.torchft
	$(BIN)/python examples/torchft_demo.py

# All but what needs containers or a newer etcd (`make test-cluster` runs that), and without a chromium all but what needs
# a browser (`make test-browser`). Most tests wait for etcd, leases or processes, so pytest runs more workers than
# there are processors.
test: $(VENV)/.ready
	$(BIN)/python -m pytest -q -n 10 --dist worksteal -m 'not alone and not browser' --ignore tests/cluster
	$(BIN)/python -m pytest -q -n 5 --dist worksteal -m 'not docker' --ignore tests/cluster/test_upgrade.py tests/cluster
	$(BIN)/python -m pytest -q -m 'alone and not docker' $(call marked,alone)
	@if [ -n "$$FTCOORD_TEST_CHROMIUM" ] || command -v chromium >/dev/null; then $(MAKE) test-browser; else \
		echo "LEFT OUT: the tests of the page in a browser. Install chromium, and run: make test-browser"; fi

# Elastic runs with a torch that reconfigures its groups, in an environment of its own (5 GB): `make test` has the one of
# tests/constraints.txt, whose groups are made anew.
test-elastic: $(VENV)-elastic/.ready
	$(VENV)-elastic/bin/python -m pytest -q -n 2 tests/unit/test_core_elastic.py tests/integration/test_elastic.py

$(VENV)-elastic/.ready: setup.cfg pyproject.toml tests/constraints.txt
	$(PYTHON) -m venv $(VENV)-elastic
	grep -v '^torch' tests/constraints.txt > $(VENV)-elastic/constraints.txt
	$(VENV)-elastic/bin/pip install -q -c $(VENV)-elastic/constraints.txt torch==2.14.1 -e '.[test]'
	touch $@

# The page of `ftcoord dashboard` in a real browser: chromium, or what FTCOORD_TEST_CHROMIUM names.
test-browser: $(VENV)/.ready
	$(BIN)/python -m pytest -q -n 4 --dist worksteal -m browser $(call marked,browser)

# The pictures in docs/dashboard.md.
pictures: $(VENV)/.ready
	$(BIN)/python tests/screenshots.py docs/images

# A rolling upgrade, where a newer etcd can be had; and what tests/cluster runs on containers, with a Docker engine of its
# own where none answers. Each of pytest's workers has containers of its own; those with logins, which cost etcd much of a
# processor, run alone.
test-cluster: $(VENV)/.ready
	FTCOORD_TEST_NEWER_ETCD="$$(docker/newer-etcd.sh $(VENV)/newer-etcd || true)" $(BIN)/python -m pytest -q -rs \
		tests/cluster/test_upgrade.py
	FTCOORD_TEST_DOCKER=1 docker/with-engine.sh sh -ec '$(BIN)/python -m pytest -q tests/cluster/test_compose.py; \
		$(BIN)/python -m pytest -q -n 2 --dist worksteal -m docker --ignore tests/cluster/test_compose.py tests/cluster'

# The image that docker-compose.yml can use where none can be pulled: FTCOORD_ETCD_IMAGE=ftcoord-etcd
etcd-image: $(VENV)/.ready
	$(BIN)/python docker/image.py

# Whole jobs under faults, in virtual time: `make sim SEEDS=10000`, and what to do with one that fails:
# `make sim-shrink SEED=4711 PROFILE='whole jobs'`.
sim: $(VENV)/.ready
	PYTHONPATH=tests/sim:tests $(BIN)/python -m simulator run --seeds $(or $(SEEDS),1000) --first $(or $(FIRST),0)

sim-shrink: $(VENV)/.ready
	PYTHONPATH=tests/sim:tests $(BIN)/python -m simulator shrink $(SEED) $(if $(PROFILE),--profile '$(PROFILE)')

soak: $(VENV)/.ready
	$(BIN)/python tests/soak.py $(or $(MINUTES),30)

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

benchmark: $(VENV)/.ready
	$(BIN)/pip install -q python-etcd urllib3
	$(BIN)/python -m benchmarks.rendezvous --write docs/benchmarks.md
	$(BIN)/python -m benchmarks.store --write docs/benchmarks.md
	$(BIN)/python -m benchmarks.quorum --write docs/benchmarks.md
	$(BIN)/python -m benchmarks.deaths --write docs/benchmarks.md
	$(BIN)/python -m benchmarks.reforming --write docs/benchmarks.md
	$(BIN)/python -m benchmarks.unstopped --write docs/benchmarks.md
	$(BIN)/python -m benchmarks.stuck --write docs/benchmarks.md
	$(BIN)/python -m benchmarks.stopping --write docs/benchmarks.md
	$(BIN)/python -m benchmarks.sentinel --write docs/benchmarks.md
	$(BIN)/python -m benchmarks.timers --write docs/benchmarks.md
	$(BIN)/python -m benchmarks.operator --write docs/benchmarks.md

# The API reference, from the docstrings.
docs: $(VENV)/.ready
	$(BIN)/pip install -q pdoc
	$(BIN)/python docs/api.py

$(VENV)/.ready: setup.cfg pyproject.toml tests/constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c tests/constraints.txt -e '.[torch,test,lint]'
	touch $@

$(VENV)/.torchft: $(VENV)/.ready
	$(BIN)/pip install -q -c tests/constraints.txt -e '.[torchft]'
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-elastic build dist *.egg-info
