# make help lists the targets. Nothing outside this folder is touched; `make clean` takes everything away again.

PYTHON ?= python3
ENGINES ?= llamacpp onnx
BACKENDS ?= native llamacpp onnx
JOBS ?= auto
MUTANTS ?= --sample 50
VENV := .venv
BIN := $(VENV)/bin
BOUNDS := $(VENV)/bounds
OTHER_ORACLES := tests/core/test_safetensors.py tests/core/test_toolschema.py tests/core/tokenization/test_world.py
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq
# Its output, with the steps of a compilation, goes through tools/progress.py.
VERBOSE_PIP := $(BIN)/python -m pip --disable-pip-version-check install -v
PROGRESS := $(BIN)/python tools/progress.py
SOURCES := pyproject.toml README.md $(shell find slm_core backends formatters conformance -type f ! -path '*/__pycache__/*')
EXAMPLE := $(shell find examples/my_backend -type f ! -path '*/__pycache__/*')

# Threads of NumPy and PyTorch gain nothing on models of a few megabytes, and where cores are busy they wait for each other.
export OPENBLAS_NUM_THREADS ?= 1
export OMP_NUM_THREADS ?= 1

# Tests start many processes of Python: each would compile again what no earlier one may write.
export PYTHONDONTWRITEBYTECODE :=

.DELETE_ON_ERROR:
.PHONY: help demo test test-bounds check platforms docs mutants soak fuzz clients sbom lock clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 19

demo: $(VENV)/introduced ## set up .venv and run the main job on every engine (ENGINES= for the built-in one alone)
	@$(MAKE) --no-print-directory $(VENV)/installed $(ENGINES:%=$(VENV)/engine-%)
	@$(BIN)/slm demo

test: $(VENV)/installed-dev $(VENV)/example/installed ## run all tests (JOBS= at once); a summary names what was skipped, and why
	$(BIN)/pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

# Tests that import torch, transformers or rwkv run in `make test` alone.
test-bounds: $(BOUNDS)/oldest/installed $(BOUNDS)/newest/installed $(VENV)/installed-dev ## run the suite on the oldest and on the newest ONNX Runtime, and tests/core and tests/context on the oldest of all dependencies
	@for which in oldest newest; do cp -r $(VENV)/lib/python3*/site-packages/slm_* $(BOUNDS)/$$which/lib/python3*/site-packages/ || exit; done
	$(BOUNDS)/oldest/bin/pytest -n $(JOBS) --dist loadfile -W default tests/conformance/test_onnx.py tests/core tests/context \
		$(OTHER_ORACLES:%=--ignore %)
	$(BOUNDS)/newest/bin/pytest -n $(JOBS) tests/conformance/test_onnx.py

check: $(VENV)/installed-dev ## check style, types, layers, the links in the documentation, and the C++
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --platform win32 --cache-dir .mypy_cache/win32
	PYTHONPATH=.:backends:formatters:conformance $(BIN)/lint-imports
	PYTHONPATH=.:backends:formatters:conformance $(BIN)/python tools/check_circles.py
	$(BIN)/python tools/check_links.py
	$(BIN)/python tools/check_examples.py
	$(BIN)/python tools/check_cpp.py

platforms: $(VENV)/installed-dev ## cross-compile the C++ for Windows and macOS (more than 10 minutes the first time); with wine, check its kernels for Windows, and all in Python for Windows
	@$(PIP) 'slm-core[cross]'
	PATH=$(CURDIR)/$(BIN):$$PATH tools/check_windows.sh
	PATH=$(CURDIR)/$(BIN):$$PATH tools/check_macos.sh
	PATH=$(CURDIR)/$(BIN):$$PATH tools/check_windows_python.sh

# Not --quiet: mkdocs would not count warnings then, and --strict fails on them.
docs: $(VENV)/installed-docs ## build the documentation site with its API reference into build/site; a broken link fails
	PYTHONPATH=.:backends:formatters:conformance NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The extension is built by pip; mutants are of the sources, which need it beside them.
mutants: $(VENV)/installed-dev ## make mutants of the code, and count those that the tests notice (MUTANTS="--help" lists the options)
	@cp $(VENV)/lib/python3*/site-packages/slm_native/_native*.so backends/slm_native/
	PYTHONPATH=.:backends:formatters:conformance:tools $(BIN)/python -m mutants $(MUTANTS)

soak: $(VENV)/installed-dev ## an hour of mixed work on every engine, then an hour of hostile input (SECONDS=, BACKENDS=); report in benchmarks/results
	nice $(BIN)/python tools/soak.py --seconds $(or $(SECONDS),3600) $(BACKENDS:%=--backend %) --seed $$(date +%Y%m%d) \
		--report benchmarks/results/soak-$$(date +%F).md
	nice $(BIN)/python -m tests.hostile --seconds $(or $(SECONDS),3600)

fuzz: $(VENV)/installed-dev ## fuzz all readers of untrusted bytes for a minute each (SECONDS=), the C++ kernels where clang++ is
	@$(PIP) '.[fuzz]'
	PYTHONPATH=tests $(BIN)/python -m fuzz.campaign $(or $(SECONDS),60)

clients: $(VENV)/installed-dev ## run the clients of others (openai, anthropic, ollama, the AI SDK, ...) against slm serve; they come from PyPI and npm
	$(BIN)/python -m tools.clients

sbom: $(VENV)/installed $(ENGINES:%=$(VENV)/engine-%) ## write dist/sbom.json: what slm-core and its engines consist of, as installed in .venv
	@mkdir -p dist
	$(BIN)/python tools/sbom.py dist/sbom.json $(ENGINES:%=--extra %)

lock: $(BIN)/python ## renew .ci/tools.lock, the checksums of the tools that `make check` runs, from the pins in pyproject.toml
	@$(PIP) pip-tools
	@$(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["check"], sep="\n")' \
		> $(VENV)/tools.in
	CUSTOM_COMPILE_COMMAND="make lock" $(BIN)/pip-compile --quiet --generate-hashes --strip-extras --allow-unsafe --no-annotate \
		--no-emit-index-url --no-emit-find-links --no-emit-trusted-host --output-file .ci/tools.lock $(VENV)/tools.in

clean: ## remove .venv, builds and caches
	rm -f backends/slm_native/_native*.so
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed (make PYTHON=python3.12)")'
	@$(PYTHON) -m venv $(VENV)

# The first demo runs on the NumPy tier, because compiling takes longer than anybody waits for one.
$(VENV)/introduced: | $(BIN)/python
	@if [ ! -e $(VENV)/installed ]; then \
		$(PROGRESS) "Installing slm-core into $(VENV), for now without its C++ kernels" -- $(VERBOSE_PIP) --no-compile \
			-C build-dir=build/numpy -C cmake.define.SLM_EXTENSION=OFF . \
		&& $(BIN)/slm demo && echo; \
	fi
	@touch $@

$(VENV)/installed: $(SOURCES) | $(BIN)/python
	@$(PROGRESS) "Installing slm-core into $(VENV) (C++ is compiled: minutes, once)" -- $(VERBOSE_PIP) .
	@touch $@

$(VENV)/installed-dev: $(SOURCES) .ci/tools.lock | $(BIN)/python
	@echo "Installing slm-core and what its tests need into $(VENV) (llama.cpp is built from source: about 4 minutes, once) ..."
	@$(PIP) --require-hashes -r .ci/tools.lock
	@$(PIP) '.[dev]'
	@touch $@ $(VENV)/installed $(VENV)/engine-llamacpp

$(VENV)/installed-docs: pyproject.toml | $(VENV)/installed
	@$(PIP) 'slm-core[docs]'
	@touch $@

# Environments of their own; slm-core itself is copied into them, as building it takes longer than the rest.
$(BOUNDS)/%/installed: pyproject.toml tools/bounds.py | $(BIN)/python
	@echo "Installing the $* versions that pyproject.toml admits into $(@D) ..."
	@rm -rf $(@D)
	@$(PYTHON) -m venv $(@D)
	@$(@D)/bin/python -m pip --disable-pip-version-check install -qq $$($(BIN)/python tools/bounds.py $*)
	@touch $@

# Beside the environment, not into it: a few tests put this folder on their path, the others must not see the backend.
$(VENV)/example/installed: $(EXAMPLE) | $(VENV)/installed-dev
	@rm -rf $(@D)
	@$(PIP) --no-deps --target $(@D) examples/my_backend
	@touch $@

BUILT_llamacpp := , built from source: about 4 minutes, once

# An engine that cannot be had is reported, and the demo runs with what is there.
$(VENV)/engine-%: | $(VENV)/installed
	@if [ $* = llamacpp ] && ! command -v c++ >/dev/null && ! command -v clang++ >/dev/null && [ -z "$$CXX" ]; then \
		echo "Engine $* is left out: it is built from source, and no C++ compiler was found."; \
	elif $(PROGRESS) "Installing engine $*$(BUILT_$*) (make demo ENGINES= leaves engines out)" -- $(VERBOSE_PIP) 'slm-core[$*]'; then \
		touch $@; \
	else \
		echo "Engine $* is left out: it could not be installed, see above."; \
	fi
