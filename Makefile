# Everything a fresh machine needs, and nothing more: Python 3.11, pip and make.
PYTHON ?= python3
VENV := .venv
# Recipe or flags for `make train`, for instance ARGS="diloco --run.seed 1".
ARGS ?=

.PHONY: install train test check format clean

install: $(VENV)/.installed

# Exact versions; pip takes torch's CPU build wherever it sees one (PIP_FIND_LINKS, PIP_EXTRA_INDEX_URL). For CUDA use plain `pip install -e .`.
$(VENV)/.installed: pyproject.toml constraints-cpu.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "adloco needs Python 3.11 or later: make PYTHON=/path/to/python3.11")'
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-cpu.txt -e '.[dev]'
	touch $@

train: install
	$(VENV)/bin/adloco train $(ARGS)

test: install
	$(VENV)/bin/python -m pytest

check: install
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

format: install
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache
