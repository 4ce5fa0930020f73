# Every target sets itself up, in .venv and build/, from a C++ compiler, CMake, Python 3.11 or later and a package index.
#   make demo [ARGS="--model resnet50 --selectors '{\"conv2d\": \"winograd\"}'"]
#   make test | test-full | wheel-test | bench [FILTER=conv2d/winograd] | figures | lint | format | docs | build | clean
# PYTHON=python3.12 chooses the interpreter, V=1 shows the commands; setup.py lists the variables of the build (USE_CUDA=0, ...).
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
ifndef V
.SILENT:
endif
MAKEFLAGS += --no-print-directory
export PATH := $(CURDIR)/.venv/bin:$(PATH)
export PIP_DISABLE_PIP_VERSION_CHECK = 1
export OMP_WAIT_POLICY ?= passive
# Images of containers set it, and uv compiles nothing: each of the tests' processes would compile all of torch's Python anew.
ifneq ($(PYTHONDONTWRITEBYTECODE),)
unexport PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX ?= $(CURDIR)/build/pycache
endif

ARGS ?=
BENCH_ARGS ?=
PYTEST_ARGS ?=
WORKERS ?= $(shell nproc 2>/dev/null || echo 1)
JOBS = $$(.venv/bin/python setup.py --jobs)
BUILD := build/native

say = echo "== $(1)"

.PHONY: demo test test-full cpp-test sanitize wheel-test bench figures lint format docs build clean

demo: build .venv/.demo
	.venv/bin/python -m ai3_ops demo $(ARGS)

build: $(BUILD)/build.ninja
	$(call say,building the libraries)
	cmake --build $(BUILD) --parallel $(JOBS) --target package_libraries

# Everything that is promised, the longest at a reduced size: C++ and Python tests, the wheel on its oldest torch and Python and
# the newest.
test: cpp-test
	$(call say,Python tests)
	.venv/bin/python -m pytest -n $(WORKERS) --dist worksteal $(PYTEST_ARGS)
	$(call say,the wheel on the oldest torch and Python and the newest: short tests)
	.venv/bin/python .ci/wheels.py --reduced

CTEST = ctest --output-on-failure --no-tests=ignore --parallel $(WORKERS) --test-dir
cpp-test: build .venv/.test
	$(call say,C++ tests)
	cmake -S . -B $(BUILD) $(CMAKE_ARGS) -DAI3_BUILD_TESTS=ON -DAI3_TEST_SPLITS=OFF >> .venv/build.log
	cmake --build $(BUILD) --parallel $(JOBS)
	$(CTEST) $(BUILD)

# The same at full size, and under sanitizers.
test-full: test
	$(call say,C++ tests of all problems)
	cmake -S . -B $(BUILD) $(CMAKE_ARGS) -DAI3_TEST_SPLITS=ON >> .venv/build.log
	cmake --build $(BUILD) --parallel $(JOBS)
	AI3_OPS_TEST_PROFILE=full $(CTEST) $(BUILD)
	$(call say,long Python tests)
	AI3_OPS_TEST_PROFILE=full .venv/bin/python -m pytest -m "full or hypothesis" $(PYTEST_ARGS)
	$(MAKE) sanitize wheel-test

# The C++ tests under AddressSanitizer and UndefinedBehaviorSanitizer, and under ThreadSanitizer; docs/decisions/sanitizers.md.
SANITIZERS := address thread
LEVELS :=
ONLY_FLOAT32 := OFF
FLAGS_address := -fsanitize=address;-fsanitize=undefined;-fno-sanitize-recover=all;-fno-sanitize-address-use-after-scope
FLAGS_thread := -fsanitize=thread
sanitize: .venv/.torch
	for sanitizer in $(SANITIZERS); do \
	  $(call say,C++ tests under sanitizers: $$sanitizer); \
	  case $$sanitizer in address) flags='$(FLAGS_address)' tests=;; thread) flags='$(FLAGS_thread)' tests='-R Threads';; esac; \
	  cmake -S . -B build/$$sanitizer -G Ninja -DPython_EXECUTABLE=$(CURDIR)/.venv/bin/python -DAI3_BUILD_LIBRARIES=OFF \
	    -DAI3_BUILD_TESTS=ON -DCMAKE_BUILD_TYPE=Debug $(CMAKE_ARGS) "-DAI3_SANITIZE=$$flags" "-DAI3_ONLY_LEVELS=$(LEVELS)" \
	    -DAI3_ONLY_FLOAT32=$(ONLY_FLOAT32) -DAI3_PRECOMPILE=OFF > /dev/null; \
	  cmake --build build/$$sanitizer --parallel $(JOBS); \
	  $(CTEST) build/$$sanitizer $$tests $(CTEST_ARGS); \
	done

# The wheel, its source tree deleted, on torch 2.11 and the newest, Python 3.11, 3.12 and 3.13; and the ways to install from source.
wheel-test: .venv/.torch
	$(call say,the wheel on each torch and Python; pip install from source)
	.venv/bin/python .ci/wheels.py

# Workers spin between calls, as they do inside a network.
bench figures: export OMP_WAIT_POLICY := active

# Every layer of the networks beside PyTorch, into docs/benchmarks/; with FILTER the kernels alone, and nothing is written.
ifdef FILTER
bench: build
	cmake -S . -B $(BUILD) $(CMAKE_ARGS) -DAI3_BUILD_BENCHMARKS=ON
	grep -q '^build ai3_bench:' $(BUILD)/build.ninja || \
	  { echo "make: needs Google Benchmark, which is neither installed nor can be downloaded" >&2; exit 1; }
	cmake --build $(BUILD) --parallel $(JOBS)
	$(BUILD)/ai3_bench --benchmark_filter='$(FILTER)' $(BENCH_ARGS)
else
bench: build
	.venv/bin/python -m benchmarks.layers $(BENCH_ARGS)
endif

# What the CPU kernels are held to, measured: docs/benchmarks/figures.md.
figures: build
	.venv/bin/python -m benchmarks.figures $(BENCH_ARGS)

NATIVE = $$(find csrc tests benchmarks docs examples -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')
lint: .venv/.lint
	clang-format --dry-run --Werror $(NATIVE)
	ruff check .
	ruff format --check .
	mypy

format: .venv/.lint
	clang-format -i $(NATIVE)
	ruff check --fix .
	ruff format .

# The tables of algorithms in README.md and docs/, from the registry, and which package imports which.
docs: build
	.venv/bin/python docs/tables.py
	.venv/bin/python docs/imports.py

clean:
	rm -rf .venv .venv-* build dist *.egg-info ai3_ops/*.so ai3_ops/include .pytest_cache .ruff_cache .mypy_cache .hypothesis

# Set-up. A stamp says what was done, and is redone only when what it depends on changes.
define need
	command -v $(1) >/dev/null || { echo "make: needs $(1) ($(2)), which is not on PATH" >&2; exit 1; }
endef

.venv/.torch:
	$(call need,cmake,3.22 or later)
	command -v "$${CXX:-c++}" >/dev/null || { echo "make: needs a C++20 compiler ($${CXX:-c++} is not on PATH; CXX names another)" >&2; exit 1; }
	for python in $(PYTHON) python3 python3.13 python3.12 python3.11 ""; do \
	  "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && break; done; \
	if [ -z "$$python" ]; then echo "make: needs Python 3.11 or later, which is not on PATH (PYTHON=... names one)" >&2; exit 1; fi; \
	"$$python" -m venv .venv || { echo "make: needs Python's venv module ($$python -m venv failed)" >&2; exit 1; }
	$(call say,installing torch into .venv: some gigabytes)
	.venv/bin/python .ci/packages.py "setuptools>=77" wheel ninja rich "torch>=2.11" torchvision
	touch $@

$(BUILD)/build.ninja: .venv/.torch setup.py pyproject.toml
	$(call say,building the package; .venv/build.log has the details)
	.venv/bin/python -m pip install --no-build-isolation --no-deps -v -e . 2>&1 | tee .venv/build.log | { $(PROGRESS); } || \
	  { cat .venv/build.log >&2; exit 1; }
	sed -n '/ai3_ops build configuration/,/Python_EXECUTABLE/p; /ai3_ops: built/p' .venv/build.log | sed 's/^  //'
	touch $@

# Ninja's [12/133], as it comes, on one line: how much is built, and for how long that has been going on.
PROGRESS = start=$$SECONDS; while read -r line; do [[ $$line =~ ^\[([0-9]+)/([0-9]+)\] ]] && \
  printf '\r   %3d %%, %d:%02d min ' $$((100 * BASH_REMATCH[1] / BASH_REMATCH[2])) $$(((SECONDS - start) / 60)) $$(((SECONDS - start) % 60)); \
  done; echo

# The packages of an extra of pyproject.toml.
.venv/.demo .venv/.test .venv/.lint: .venv/.%: .venv/.torch pyproject.toml
	$(call say,installing what make $* needs)
	.venv/bin/python .ci/packages.py --extra $*
	touch $@
