PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: train test test-all lint clean

train: $(READY)
	$(BIN)/elastic train byte_lm --workers 4

test: $(READY) lint
	$(BIN)/pytest -m "not slow and not gpu" --durations=10

test-all: $(READY)
	$(BIN)/pytest -m "slow or gpu" --durations=10

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $(READY)

clean:
	rm -rf .venv build *.egg-info
