# Every target sets itself up, in .venv and build/, from a C++ compiler, CMake, Python 3.11 or later and a package index.
#   make demo [ARGS="--model resnet50 --selectors '{\"conv2d\": \"winograd\"}'"]
#   make test | test-full | wheel-test | bench [FILTER=conv2d/winograd] | figures | lint | format | docs | build | clean
# PYTHON=python3.12 chooses the interpreter; setup.py lists the variables of the build (USE_CUDA=0, MAX_JOBS, ...).
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory
export PATH := $(CURDIR)/.venv/bin:$(PATH)
export PIP_DISABLE_PIP_VERSION_CHECK = 1
export OMP_WAIT_POLICY ?= passive
# Warnings are ours to mend, not the users' of a wheel or of `pip install`.
export CMAKE_ARGS := -DAI3_WERROR=ON $(CMAKE_ARGS)

ARGS ?=
BENCH_ARGS ?=
PYTEST_ARGS ?=
WORKERS ?= $(shell nproc 2>/dev/null || echo 1)
JOBS = $$(.venv/bin/python setup.py --jobs)
BUILD := build/native

.PHONY: demo test test-full wheel-test bench figures lint format docs build clean

demo: build .venv/.demo
	.venv/bin/python -m ai3_ops demo $(ARGS)

build: $(BUILD)/build.ninja
	cmake --build $(BUILD) --parallel $(JOBS) --target package_libraries

test: cpp-test
	.venv/bin/python -m pytest -n $(WORKERS) $(PYTEST_ARGS)

.PHONY: cpp-test
cpp-test: build .venv/.test
	cmake -S . -B $(BUILD) -DAI3_BUILD_TESTS=ON
	cmake --build $(BUILD) --parallel $(JOBS)
	ctest --test-dir $(BUILD) --output-on-failure --no-tests=ignore

# Everything: the long tests, the C++ tests under AddressSanitizer and UndefinedBehaviorSanitizer, the wheel on all its hosts.
test-full: test
	.venv/bin/python -m pytest -m full $(PYTEST_ARGS)
	cmake -S . -B build/sanitized -G Ninja -DPython_EXECUTABLE=$(CURDIR)/.venv/bin/python -DAI3_BUILD_LIBRARIES=OFF -DAI3_BUILD_TESTS=ON \
	  -DAI3_WERROR=ON -DCMAKE_BUILD_TYPE=Debug "-DAI3_SANITIZE=-fsanitize=address;-fsanitize=undefined;-fno-sanitize-recover=all"
	cmake --build build/sanitized --parallel $(JOBS)
	ctest --test-dir build/sanitized --output-on-failure --no-tests=ignore
	$(MAKE) wheel-test

# One wheel, its source tree deleted, on torch 2.11 and the newest, Python 3.11 and 3.12.
wheel-test: .venv/.torch
	.venv/bin/python .ci/wheels.py

# Every layer of the networks beside PyTorch, into docs/benchmarks/; with FILTER the kernels alone, and nothing is written.
ifdef FILTER
bench: build
	cmake -S . -B $(BUILD) -DAI3_BUILD_BENCHMARKS=ON
	cmake --build $(BUILD) --parallel $(JOBS)
	if [ -x $(BUILD)/ai3_bench ]; then $(BUILD)/ai3_bench --benchmark_filter='$(FILTER)' $(BENCH_ARGS); fi
else
bench: build
	OMP_WAIT_POLICY=active .venv/bin/python -m benchmarks.layers $(BENCH_ARGS)
endif

# What the CPU kernels are held to, measured: docs/benchmarks/figures.md.
figures: build
	OMP_WAIT_POLICY=active .venv/bin/python -m benchmarks.figures $(BENCH_ARGS)

NATIVE = $$(find csrc tests benchmarks docs -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')
lint: .venv/.lint
	clang-format --dry-run --Werror $(NATIVE)
	ruff check .
	ruff format --check .
	mypy

format: .venv/.lint
	clang-format -i $(NATIVE)
	ruff check --fix .
	ruff format .

# The tables of algorithms in README.md and docs/, from the registry.
docs: build
	.venv/bin/python docs/tables.py

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
	.venv/bin/python -m pip install -q --upgrade pip
	.venv/bin/python -m pip install -q "setuptools>=77" wheel ninja "torch>=2.11" torchvision
	touch $@

$(BUILD)/build.ninja: .venv/.torch setup.py pyproject.toml
	.venv/bin/python -m pip install -q rich
	.venv/bin/python -m pip install --no-build-isolation --no-deps -v -e . > .venv/build.log 2>&1 || { cat .venv/build.log >&2; exit 1; }
	sed -n '/ai3_ops build configuration/,/Python_EXECUTABLE/p; /ai3_ops: built/p' .venv/build.log | sed 's/^  //'
	touch $@

# The packages of an extra of pyproject.toml.
.venv/.demo .venv/.test .venv/.lint: .venv/.%: .venv/.torch pyproject.toml
	.venv/bin/python -c 'import tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	  print(*p["dependencies"], *p["optional-dependencies"]["$*"], sep="\n")' > .venv/$*.txt
	.venv/bin/python -m pip install -q -r .venv/$*.txt
	touch $@
