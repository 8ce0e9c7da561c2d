# Two commands: `make up` serves a cluster, `make test` checks the project. Both do their own set-up.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
VLLM   := $(abspath $(or $(PENSTOCK_VLLM_VENV),.venv-vllm))
FAST   := .venv-fast
K8S    := $(abspath $(or $(PENSTOCK_K8S_PROGRAMS),.programs))
LLAMA  := $(abspath $(or $(PENSTOCK_LLAMACPP_VENV),.venv-llamacpp))

pip = $(1)/bin/python -m pip --disable-pip-version-check -q
# uv takes seconds where pip takes minutes. pip does it where pip has an index of its own, which uv does not know, or uv fails.
# $(1) is an environment's folder, $(2) what goes into it.
define into
@! $(1)/bin/python -m pip config list | grep -Eq '\.(no-)?index' && \
$(call pip,$(1)) install uv && \
$(1)/bin/uv pip install -q --python $(1)/bin/python $(2) || \
$(call pip,$(1)) install $(2)
endef

# Tests start hundreds of processes: without bytecode files, as some environments want it, each takes twice as long.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: soak soak-vllm up install dev pinned docs test test-fast fast nightly nixl test-compiled test-nixl test-kubernetes test-vllm test-sglang test-llamacpp lint types format bench-gateway bench-pickers bench-index bench-routing bench-simulate bench-timing bench-proof bench-fidelity bench-disaggregation bench-planner study-planner study-disaggregation bench-tiers bench-start bench-front-door bench-scale bench-transfer bench-long-prompts bench-membership recipes requirements release version clean help bench-kv-events

help: ## Show what can be made
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 16

up: install ## Install, then serve a simulated cluster on 127.0.0.1:8000
	@exec $(BIN)/penstock up

install: $(VENV)/.installed ## Make .venv and install the package

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "penstock needs Python 3.11 or newer; set PYTHON="; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(VENV)/bin/python
	$(call into,$(VENV),-e .)
	@touch $@

dev: $(VENV)/.dev ## Install what the checks need as well

$(VENV)/.dev: pyproject.toml | $(VENV)/bin/python
	$(call into,$(VENV),-e '.[dev]')
	@touch $@ $(VENV)/.installed

pinned: requirements/ci.txt pyproject.toml | $(VENV)/bin/python ## Install as CI does: by version and hash
	$(call into,$(VENV),--require-hashes -r requirements/ci.txt)
	$(call into,$(VENV),--no-deps -e .)
	@touch $(VENV)/.dev $(VENV)/.installed

CLIENTS := -e '.[dev,fuzz,clients]'
$(VENV)/.clients: $(VENV)/.dev
	$(call into,$(VENV),$(CLIENTS))
	@touch $@

# NeMo Agent Toolkit has 1.3 GB of requirements, of other versions than ours.
.venv-nat/.installed:
	$(PYTHON) -m venv .venv-nat
	$(call into,.venv-nat,"nvidia-nat[langchain]")
	@touch $@

.venv-docs/.installed: pyproject.toml
	@test -x .venv-docs/bin/python || $(PYTHON) -m venv .venv-docs
	$(call into,.venv-docs,-e '.[docs]')
	@touch $@

docs: .venv-docs/.installed ## Build the site into build/site, with the pages of settings and commands; a dead link fails
	.venv-docs/bin/mkdocs build

test: dev ## Lint, types, import contracts and all fast tests
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target lint types
	$(BIN)/python -m tests.run

test-fast: dev ## Only the pure rooms' tests
	$(BIN)/python -m tests.run pure

fast: $(FAST)/.installed ## Compile the hot modules into .venv-fast: simulations take half the time (3 minutes, and a C compiler)
	@$(FAST)/bin/penstock --version

$(FAST)/.installed: pyproject.toml hatch_build.py $(shell find src -type f -not -name '*.pyc')
	@test -x $(FAST)/bin/python || $(PYTHON) -m venv $(FAST)
	rm -rf build/fast
	HATCH_BUILD_HOOKS_ENABLE=1 $(call pip,$(FAST)) wheel --no-deps -w build/fast .
	$(call pip,$(FAST)) uninstall -y penstock
	$(call into,$(FAST),build/fast/*.whl)
	@touch $@

$(FAST)/.dev: $(FAST)/.installed
	$(call into,$(FAST),"$$(echo build/fast/*.whl)[dev]")
	@touch $@

nixl: dev
	$(call into,$(VENV),--no-deps nixl==1.5.0 nixl-cu12==1.5.0)

# The suites of tests/suites.py, with what each needs made first.
test-compiled: dev ## The compiled build, its random tests at full depth (3 minutes to compile, and a C compiler)
	$(BIN)/python -m tests.run compiled

test-vllm: dev ## Prove it on two real vLLM servers (CPU build): 2 minutes to install 2.7 GB
	$(BIN)/python -m tests.run vllm

test-sglang: dev ## Prove it on two real SGLang servers (a CPU, alone and as a pair): 2 minutes to install 2.6 GB
	$(BIN)/python -m tests.run sglang

soak-vllm: dev ## Let three policies scale a real vLLM from a measured profile alone, a row of docs/bench/accuracy.md each, and one from its passes (12 minutes)
	$(BIN)/python -m tests.run soak-vllm

test-nixl: dev ## Prove the transfer library's NIXL backends on the real package (70 MB to install, without torch)
	$(BIN)/python -m tests.run nixl

test-kubernetes: dev ## Prove it with real kubectl, helm, Envoy, nginx and HAProxy (180 MB to fetch)
	$(BIN)/python -m tests.run kubernetes double image pickers

test-llamacpp: dev ## Prove the planner on llama.cpp's own servers: they are built first, in some five minutes
	$(BIN)/python -m tests.run llamacpp

nightly: ## Run everything at full depth and write docs/reference/nightly.json; SUITES= names some (85 minutes)
	.ci/run nightly $(SUITES)

lint: dev ## Format, lint and import contracts
	$(BIN)/ruff format --check src tests bench deploy hatch_build.py
	$(BIN)/ruff check src tests bench deploy hatch_build.py
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m tests.house

types: dev ## Check types
	$(BIN)/mypy

bench-routing: install ## Measure routing modes on the Mooncake traces into docs/ (25 minutes on an idle machine)
	$(BIN)/python bench/mooncake/run.py --docs docs/bench/routing.md

bench-index: install ## Measure the index beside its peer; PEERS= names a folder with the peer's environment
	$(BIN)/python bench/index/run.py --docs docs/bench/kv-index.md

soak: dev ## Let a cluster stand a storm of twenty minutes, and write down how it did; SECONDS=, SEED=
	$(BIN)/python -m tests.soak.storm $(or $(SECONDS),1200) --seed $(or $(SEED),1) --docs docs/bench/soak.md

bench-pickers: dev ## Measure a request's cost where Envoy, nginx or HAProxy carry it and a picker chooses (8 minutes)
	$(BIN)/python tests/kubernetes/setup/install.py $(K8S)
	PENSTOCK_K8S_PROGRAMS=$(K8S) $(BIN)/python bench/pickers/run.py --docs docs/bench/pickers.md

bench-gateway: install ## Measure a request's cost beside other gateways; PEERS= names a folder with the peers' environments (25 minutes)
	$(BIN)/python bench/gateway/run.py --docs docs/bench/gateway.md

bench-simulate: install fast ## Time simulations, beside a peer where PEERS names one, into docs/ (25 minutes)
	$(BIN)/python bench/simulate/run.py --million --docs docs/bench/simulate.md

bench-timing: install ## Fit the roofline to measured points and hold it to the others, into docs/ (1 minute)
	$(BIN)/python bench/roofline/run.py --docs docs/concepts/timing.md

bench-proof: install ## Fit half of the measured points, be judged by the rest, beside aiconfigurator in PEERS, into docs/ (2 minutes)
	$(BIN)/python bench/roofline/proof.py --docs docs/bench/timing-proof.md

bench-fidelity: install ## Hold the simulated engine to a measured GPU run and to a live vLLM, into docs/ (5 minutes; make test-vllm installs vLLM)
	PENSTOCK_VLLM_VENV=$(VLLM) $(BIN)/python bench/fidelity/run.py --docs docs/bench/fidelity.md

bench-disaggregation: install ## Aggregated engines against splits of equally many, a peer and a live run, into docs/ (20 minutes; PEERS=)
	$(BIN)/python bench/disaggregation/run.py --docs docs/bench/disaggregation.md

study-planner: install ## Attainment against GPU-hours of all policies, static fleets and a clairvoyant, into docs/ (a night, goes on; TRACES=)
	$(BIN)/python bench/planner_study/run.py --full --traces $(or $(TRACES),../shared/traces) --docs docs/bench/planner-study.md

study-disaggregation: install ## Search the design space of split engines and simulate what it leaves out, into docs/ (1 minute; TRACES=)
	$(BIN)/penstock study disaggregation --out runs/design --docs docs/bench/disaggregation-study.md --traces $(or $(TRACES),../shared/traces)

bench-planner: install ## Our planner and Dynamo's in Dynamo's own simulator, into docs/; PEERS= names a folder with its environment (25 minutes, goes on)
	$(BIN)/python bench/planner_referee/run.py --docs docs/bench/planner-referee.md

bench-tiers: install ## Hit rate, TTFT and GPU-hours with tiers of KV and without, simulated, into docs/ (10 minutes)
	$(BIN)/python bench/tiers/run.py --docs docs/bench/tiers.md

bench-start: install ## Seconds of vLLM starts by phase: files, a sibling's weights, kept compile cache, into docs/ (10 minutes; make test-vllm installs vLLM)
	PENSTOCK_VLLM_VENV=$(VLLM) $(BIN)/python bench/start_up.py --compile --docs docs/bench/start-up.md

bench-front-door: install ## vLLM's render, generate and derender routes beside our own path, into docs/ (5 minutes; make test-vllm makes what it needs)
	PENSTOCK_VLLM_VENV=$(VLLM) $(BIN)/python bench/front_door.py $(firstword $(filter-out %.lock,$(wildcard build/vllm-model-*))) --docs docs/bench/front-door.md

bench-scale: install ## A request's CPU before 4 to 2,000 engines, ours and the gateways in PEERS, into docs/ (15 minutes)
	$(BIN)/python bench/scale/request_cost.py --sizes 4,500,2000 --docs docs/bench/scale.md

bench-long-prompts: install ## CPU of prompts of 100,000 tokens: new, known but for their end, repeated, into docs/ (3 minutes)
	$(BIN)/python bench/long_prompts.py --docs docs/bench/long-prompts.md

bench-membership: install ## 2,000 workers in SQLite, etcd and a Kubernetes double: joins, leaves, rest, a store that does not answer; rolling restarts; placements among four frontends; into docs/ (7 minutes)
	$(BIN)/python bench/scale/membership.py --docs docs/bench/membership.md

bench-kv-events: install ## KV events of 500 engines: steady, a burst of all at once, a frontend that joins late, into docs/ (1 minute)
	$(BIN)/python bench/scale/kv_events.py --docs docs/bench/kv-events.md

bench-transfer: install ## Transfers beside raw limits, and beside NIXL and KVCR in PEERS, into docs/ (5 minutes on an idle machine)
	$(BIN)/python bench/transfer/run.py --docs docs/bench/transfer.md

recipes: install ## Plan eight well-known models on three GPUs anew: examples/recipes and docs/guides/recipes.md (3 minutes)
	$(BIN)/python bench/recipes.py --docs docs/guides/recipes.md

.venv-release/.installed: pyproject.toml
	@test -x .venv-release/bin/python || $(PYTHON) -m venv .venv-release
	$(call into,.venv-release,-e '.[release]')
	@touch $@

requirements: .venv-release/.installed ## Pin what CI installs by version and hash, into requirements/ci.txt
	.venv-release/bin/uv pip compile pyproject.toml --extra dev --extra fuzz --extra clients --universal --python-version 3.11 \
	  --upgrade --generate-hashes --no-annotate --no-header --no-emit-index-url --quiet --output-file requirements/ci.txt

release: .venv-release/.installed ## Make the files of a release into dist/VERSION: VERSION=X.Y.Z, COMPILED=1, BASE=IMAGE
	.venv-release/bin/python deploy/release.py $(or $(VERSION),"") $(if $(COMPILED),--compiled) $(if $(BASE),--base $(BASE))

version: .venv-release/.installed ## Write VERSION=X.Y.Z into every place that has it
	.venv-release/bin/python deploy/release.py $(or $(VERSION),"") --set

format: dev ## Put the sources in order
	$(BIN)/ruff format src tests bench deploy hatch_build.py
	$(BIN)/ruff check --fix src tests bench deploy hatch_build.py

clean: ## Remove the virtual environment and caches; run folders stay
	rm -rf $(VENV) .venv-* .mypy_cache .ruff_cache .hypothesis build dist
