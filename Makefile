# Everything starts here; each target sets up .venv by itself. On a fresh machine: make demo, make test.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
SHARED_DATA := $(wildcard ../shared/data)
ifneq ($(SHARED_DATA),)
export ROUNDELAY_DATA ?= $(abspath $(SHARED_DATA))
endif

.DEFAULT_GOAL := help
.PHONY: help setup demo check docs test test-all pictures clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):[^#]*##  *\(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

setup: $(READY)  ## the virtual environment .venv, with everything below installed

$(READY): pyproject.toml constraints.txt tools/set-up
	@PYTHON=$(PYTHON) tools/set-up
	@touch $@

demo: $(READY)  ## see it work: a training run with a straggler, DDP's way and ours, with a report; and the topologies behind it
	@mkdir -p out && rm -rf out/allreduce out/adpsgd
	@echo "Four learners on real digits, learner 0 ten times slower. First as DDP does it: everyone waits for it."
	@$(BIN)/roundelay train tiny --strategy allreduce --slow 0:10 --out out/allreduce
	@echo
	@echo "Now asynchronously on a randomised ring: nobody waits, and the mean model learns from all."
	@$(BIN)/roundelay train tiny --strategy adpsgd --slow 0:10 --out out/adpsgd
	@echo
	@$(BIN)/roundelay report out/allreduce out/adpsgd --out out/report.html
	@$(BIN)/roundelay topology compare --learners 64 --plot out/gaps.svg
	@$(BIN)/roundelay topology random-ring --learners 16 --draw out/random-ring.svg
	@echo "The ring's gap collapses as learners are added; permuting it every round wins it back at the same bytes:"
	@echo "  out/report.html      both runs side by side: open it in a browser"
	@echo "  out/gaps.svg         spectral gap of every topology against the number of learners"
	@echo "  out/random-ring.svg  four rounds of the randomised ring"

check: $(READY)  ## format, lint, types, layers
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo

docs: $(READY)  ## build the documentation into site/
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "documentation: site/index.html"

test: check docs  ## what CI runs: check, docs, and every test that is not slow
	@$(BIN)/pytest -q -m "not slow and not gpu" --cov

test-all: check docs  ## the same with the slow tests
	@$(BIN)/pytest -q -m "not gpu" --cov

pictures: $(READY)  ## draw the pictures of README and docs again
	@$(BIN)/python tools/pictures.py

clean:  ## remove what was made
	rm -rf .venv site out build dist .coverage .hypothesis .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
