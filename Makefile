# Wrappers only: README.md spells out the same commands for people without make.
PYTHON ?= python3
BIN := .venv/bin
ARGS ?=

.PHONY: demo test slow lint bench clean

demo: .venv/base.stamp
	$(BIN)/mmgrpo train image $(ARGS)

test: .venv/dev.stamp
	$(BIN)/python -m pytest -n logical --maxprocesses 4 --dist loadfile -m "not slow" $(ARGS)

slow: .venv/dev.stamp
	$(BIN)/python -m pytest -m slow $(ARGS)

# The type checker sees what a user gets: the installed wheel with its py.typed. An old build/ would leak into it.
lint: .venv/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf build
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --target build/site .
	cd build/site && $(CURDIR)/$(BIN)/mypy --config-file $(CURDIR)/pyproject.toml -p mmgrpo

bench: .venv/base.stamp
	$(BIN)/python -m benchmarks.core_scaling
	$(BIN)/python -m benchmarks.train_step

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis

# The stamps are written last, so an interrupted installation is repeated.
.venv/base.stamp: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -c constraints.txt -e .
	touch $@

.venv/dev.stamp: .venv/base.stamp
	$(BIN)/python -m pip install -c constraints.txt -e ".[dev]"
	touch $@
