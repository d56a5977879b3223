# The two commands of the README are `make demo` and `make test`. Both make .venv first.
# Another Python: make PYTHON=python3.12 test

PYTHON ?= python3
BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest

.PHONY: .venv demo test test-all lint bench docs clean

# The stamp is written last: an install that was interrupted is done again.
.venv: .venv/.installed

.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt torch -e ".[examples,dev,docs]"
	touch $@

demo: .venv
	$(BIN)/python -m examples.rl_cartpole

lint: .venv
	$(BIN)/ruff check .
	$(BIN)/mypy

test: lint
	$(PYTEST)

test-all: lint
	$(PYTEST) -m "slow or not slow"

bench: .venv
	$(BIN)/python -m benchmarks

# The site, in site/: open site/index.html. (The variable keeps a notice of the theme's about MkDocs out.)
docs: .venv
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

clean:
	rm -rf site .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist *.egg-info runs
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
