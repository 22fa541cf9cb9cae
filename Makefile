PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
NUM_TEST_WORKERS ?= 2
PYTEST := $(BIN)/pytest -n $(NUM_TEST_WORKERS) --no-loadscope-reorder
RESULTS := build/tests

.PHONY: setup train test test-torch ci soak gpu bench bench-readme lint docs clean

setup: $(READY)

train: $(READY)
	$(BIN)/elastic train byte_lm --workers 4

test: $(READY) lint
	$(PYTEST) -m "not slow and not soak and not gpu" --durations=10

# Another torch in an environment of its own: make test-torch TORCH=2.15.0
test-torch:
	@test -n "$(TORCH)" || { echo "say which: make test-torch TORCH=2.15.0"; exit 2; }
	$(PYTHON) -m venv build/torch-$(TORCH)
	grep -v "^torch==" constraints.txt > build/torch-$(TORCH)/constraints.txt
	build/torch-$(TORCH)/bin/pip install --quiet --disable-pip-version-check \
		-c build/torch-$(TORCH)/constraints.txt -e ".[dev]" "torch==$(TORCH)"
	build/torch-$(TORCH)/bin/pytest -n $(NUM_TEST_WORKERS) --no-loadscope-reorder -m "not soak" \
		tests/unit tests/properties tests/processes

ci: $(READY)
	$(MAKE) --jobs=2 lint docs
	ELASTIC_KEEP_SEEDS=1 $(PYTEST) -m "not soak" --durations=0 --durations-min=1 \
		--junitxml=$(RESULTS)/ci.xml

soak: $(READY)
	ELASTIC_KEEP_SEEDS=1 $(PYTEST) -m "soak" --durations=0 --durations-min=1 \
		--junitxml=$(RESULTS)/soak.xml

# On a machine with a GPU: its tests and measurements, written to docs/gpu.md. Needs no Ray.
gpu:
	PYTHONPATH=$(CURDIR) $(or $(wildcard $(BIN)/python),$(PYTHON)) benchmarks/gpu.py

bench: $(READY)
	$(BIN)/python benchmarks/run_all.py

bench-readme: $(READY)
	$(BIN)/python benchmarks/make_readme.py

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tools/words.py
	$(BIN)/codespell

docs: $(READY)
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going --fresh-env \
		--conf-dir docs --doctree-dir build/doctrees . build/site

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	$(BIN)/python -m compileall -q elastic actors pipelines
	touch $(READY)

clean:
	rm -rf .venv build *.egg-info
