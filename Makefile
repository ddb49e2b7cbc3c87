# What a person types. The build itself is CMakeLists.txt; `make` only finds what it needs and names the usual ways in.
#   JOBS=N            compilers and tests at once (default: one a core, as memory allows)
#   TESSERA_LIBTORCH  the libtorch to build with (default: CMAKE_PREFIX_PATH's, python3's, or one installed into .deps/venv)

JOBS ?= $(shell scripts/jobs.sh)

.DEFAULT_GOAL := help
.PHONY: help setup build test test-sanitize demo bench format lint lint-all setup-lint clean

help:  ## lists these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-14s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

setup:  ## installs what is missing: packages, libtorch
	@scripts/setup.sh

build: setup  ## builds everything; the program is build/release/bin/tessera
	@scripts/configure.sh release
	@cmake --build --preset release -j $(JOBS)

test: build  ## builds everything and runs every test
	@ctest --preset release -j $(JOBS)

test-sanitize:  ## runs the fast tests under AddressSanitizer and UndefinedBehaviorSanitizer
	@scripts/setup.sh --sanitize
	@scripts/configure.sh sanitize
	@cmake --build --preset sanitize -j $(JOBS)
	@ctest --preset sanitize -j $(JOBS)

demo: build  ## trains a small model on Shakespeare on two ranks, and shows what sharding saved
	@build/release/bin/tessera demo

bench: build  ## measures, and writes bench/RESULTS.md
	@bench/run --write

format: setup-lint  ## formats all sources
	@scripts/lint.sh format

lint: setup-lint  ## checks format, includes, and (clang-tidy) the files that include little of libtorch
	@scripts/lint.sh check

lint-all: setup-lint  ## the same with clang-tidy over all files; takes long
	@scripts/lint.sh check-all

setup-lint:
	@scripts/setup.sh --lint
	@scripts/configure.sh release

clean:  ## removes what was built; keeps .deps
	@rm -rf build
