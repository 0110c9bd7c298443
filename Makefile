# Everything starts here; each target sets up .venv by itself. On a fresh machine: make demo, make test.
PYTHON ?= python3
BIN := .venv/bin
DEMO := .venv/.demo
READY := .venv/.ready
INTEGRATIONS := .venv/.integrations
SLOW := .venv/.slow
# Two workers, and whole files for each: what a file's tests share, such as four started learners, is made once.
PYTEST := $(BIN)/pytest -q -n 2 --dist loadfile --no-loadscope-reorder
SHARED_DATA := $(wildcard ../shared/data)
ifneq ($(SHARED_DATA),)
export ROUNDELAY_DATA ?= $(abspath $(SHARED_DATA))
endif

.DEFAULT_GOAL := help
.PHONY: help setup demo check docs test test-all test-lowest pictures clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):[^#]*##  *\(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

setup: $(READY)  ## the virtual environment .venv, with everything below installed

$(DEMO): pyproject.toml constraints.txt tools/set-up
	@PYTHON=$(PYTHON) tools/set-up demo
	@touch $@

$(READY): pyproject.toml constraints.txt tools/set-up
	@PYTHON=$(PYTHON) tools/set-up
	@touch $@ $(DEMO)

$(INTEGRATIONS): $(READY)
	@tools/set-up integrations
	@touch $@

$(SLOW): $(INTEGRATIONS)
	@tools/set-up slow
	@touch $@

demo: $(DEMO)  ## see it work: speech made here, learnt by four learners and recognised in new voices; then a straggler
	@mkdir -p out && rm -rf out/speech out/allreduce out/adpsgd
	@echo "1. Half an hour of speech, made on this machine. The voices of valid and test are heard nowhere in training."
	@$(BIN)/roundelay speech corpus synth
	@echo
	@echo "2. Four learners train an acoustic model: asynchronously, averaging in pairs on a randomised ring."
	@$(BIN)/roundelay train synth --out out/speech
	@echo
	@echo "3. Their mean model recognises the voices that it never heard."
	@$(BIN)/roundelay evaluate out/speech
	@$(BIN)/roundelay report out/speech --out out/speech.html
	@echo
	@echo "4. One learner ten times slower, on digits: first as DDP does it (everyone waits), then asynchronously."
	@$(BIN)/roundelay train tiny --strategy allreduce --slow 0:10 --out out/allreduce
	@$(BIN)/roundelay train tiny --strategy adpsgd --slow 0:10 --out out/adpsgd
	@echo
	@$(BIN)/roundelay report out/allreduce out/adpsgd --out out/stragglers.html
	@echo
	@echo "Open in a browser: out/speech.html (the run), out/stragglers.html (both ways side by side)."
	@echo "Go on with the README's \"Run it\"; its commands work after: source .venv/bin/activate"

check: $(READY) $(INTEGRATIONS)  ## format, lint, types, layers
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo

docs: $(READY)  ## build the documentation into site/
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "documentation: site/index.html"

test: check docs  ## what CI runs: check, docs, and every test that is not slow
	@$(PYTEST) -m "not slow and not gpu"

test-all: check docs $(SLOW)  ## the same with the slow tests, and what they cover
	@seed=$$(date +%s)000 && echo "20,000 fault schedules, from seed $$seed on" && \
	ROUNDELAY_FRESH_SEED=$$seed $(PYTEST) -m "not gpu" --cov

test-lowest: $(INTEGRATIONS)  ## the tests of Lightning, Accelerate and Hugging Face with the lowest versions that we allow
	@tools/test-lowest

pictures: $(READY)  ## draw the pictures of README and docs again
	@$(BIN)/python tools/pictures.py

clean:  ## remove what was made
	rm -rf .venv site out build dist .coverage .hypothesis .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
