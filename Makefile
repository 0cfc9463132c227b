# Every target sets up what it needs in .venv; a machine with Python 3.11 (with venv) and make is enough.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
WORKERS ?= 2

.PHONY: demo test test-gpu lint docs bench stubs clean setup

setup: $(VENV)/.ready

# torch first and pinned: a range would take a CUDA build of several gigabytes on a machine without a GPU.
$(VENV)/.ready: pyproject.toml requirements-ci.txt
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements-ci.txt
	$(PY) -m pip install --quiet --disable-pip-version-check -e ".[test,dev]"
	touch $@

demo: setup
	$(PY) examples/01_tiny_moe_lm.py

test: setup
	$(PY) -m pytest -n $(WORKERS)

test-gpu: setup
	$(PY) -m pytest -m gpu

lint: setup docs
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	rm -rf build/typed && $(PY) -m pip install --quiet --no-deps --no-build-isolation --target build/typed .
	$(VENV)/bin/pyright

# In the same environment: the page of the command comes from the command itself. --quiet would hide warnings from --strict.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

$(VENV)/.docs: $(VENV)/.ready
	$(PY) -m pip install --quiet --disable-pip-version-check -e ".[docs]"
	touch $@

bench: setup
	$(PY) -m moe_ops.bench

stubs: setup
	$(PY) -m moe_ops.schemas > csrc_stubs/schemas.h

clean:
	rm -rf $(VENV) build dist site *.egg-info .pytest_cache .ruff_cache .hypothesis
