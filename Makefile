# Everything a fresh machine needs, and nothing more: Python 3.11, pip and make.
PYTHON ?= python3
VENV := .venv
# Versions to install; empty: the newest of everything. CI also installs constraints-lowest.txt.
CONSTRAINTS := constraints-cpu.txt
# What `make train` trains, for instance ARGS="adloco --run.seed 1"; flags for `make bench`.
ARGS ?=

.PHONY: install train bench test test-all removable without-lab without-elastic check docs format dist lowest newest clean

install: $(VENV)/.installed

# pip takes torch's CPU build wherever it sees one (PIP_FIND_LINKS, PIP_EXTRA_INDEX_URL).
# For CUDA use plain `pip install -e .`.
$(VENV)/.installed: pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "adloco needs Python 3.11 or later: make PYTHON=/path/to/python3.11")'
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing adloco and its tools into $(VENV): about 1.5 GB, a minute or more"
	@.ci/pip-install $(VENV)/bin/python $(CONSTRAINTS:%=-c %) -e '.[dev]'
	@touch $@

train: install
	$(VENV)/bin/adloco train $(or $(ARGS),diloco)

# Measures adloco beside bare loops and other libraries, and writes benchmarks/performance.md.
bench: install
	$(VENV)/bin/python benchmarks/bench.py $(ARGS)

# Several processes of pytest (tests/conftest.py says how many). They keep the bytecode of adloco and
# of the tests, which each rank would compile again otherwise.
PYTEST = PYTHONDONTWRITEBYTECODE= $(VENV)/bin/python -m pytest -n auto --dist worksteal

test: install
	$(PYTEST)

# The tests without a room that can be removed: a copy of the tree that lacks it.
removable: without-lab without-elastic

without-lab without-elastic: without-%: install
	rm -rf build/$@
	mkdir -p build/$@
	git ls-files -z | grep -zvE '^(src/adloco|tests)/$*/' | xargs -0 cp --parents -t build/$@
	ln -s ../../$(VENV) build/$@/$(VENV)
	cd build/$@ && PYTHONPATH=src $(PYTEST)

# Every placement and every combination, as the nightly job runs them, with the lines that the
# test processes (not the ranks that they start) have covered.
test-all: install
	$(PYTEST) --all --cov=adloco --cov-report=term:skip-covered

check: docs
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

# The site from the Markdown pages, in build/site/index.html. A warning is an error: a link whose
# page, file or heading is missing, or a page that the navigation lacks. It reads all pages again
# each time, because Sphinx warns of a page only when it reads it.
docs: install
	$(VENV)/bin/sphinx-build -qW --keep-going -E -c docs . build/site
	@cp build/site/README.html build/site/index.html

format: install
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

# Wheel and sdist, each installed in a clean environment and used from an empty folder.
dist: install
	.ci/dist $(VENV)/bin/python $(CONSTRAINTS)

# The tests with the oldest releases that pyproject.toml allows. Deprecation warnings are no errors
# there: an old release uses what newer releases of its own dependencies deprecate.
lowest: export PYTEST_ADDOPTS = -W default::DeprecationWarning
lowest:
	$(MAKE) test VENV=.venv-lowest CONSTRAINTS=constraints-lowest.txt

# The tests with the newest releases of today: several GB where pip sees no CPU build of torch.
newest:
	rm -rf .venv-newest
	$(MAKE) test VENV=.venv-newest CONSTRAINTS=

clean:
	rm -rf $(VENV) .venv-lowest .venv-newest build dist .mypy_cache .ruff_cache .pytest_cache
