# Every target first installs its requirements into .venv. PYTHON selects the interpreter (3.11 or newer).
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# What suites in .venv need beside the tools of development.
EXTRAS := ray,trl,mlflow,wandb,browser,docs
COMMA := ,
EXTRAS_INSTALLED := $(addprefix $(INSTALLED)-,$(subst $(COMMA), ,$(EXTRAS)))
# Each worker runs neighbouring tests, which share fixtures; one that is done takes half of what the other has left.
PARALLEL := -n 2 --dist worksteal
# Suites that `make test` and `make test-slow` leave to targets of their own.
OTHERS := ray or integrations or browser or containers or agents or environments or verl or tinker
# Every run shows its slowest tests and why tests were skipped.
SHOWN := --durations=15 -rs
# Tests of real processes have more time and are retried once, and the summary lists every retry.
RETRY := --timeout=120 --durations=15 --reruns 1 -rRs
# Without bytecode, each of the hundreds of processes that the tests start would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install nightly install-ray install-integrations install-browser install-docs install-extras install-containers demo test test-slow test-engines test-ray test-integrations test-browser test-agents test-environments test-verl test-tinker test-containers test-gpu offline check format bench bench-verl docs test-docs clean

help:  ## Show the targets.
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: $(INSTALLED)  ## Install the package and its development tools into .venv.

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(INSTALLED): pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	@touch $@ $@-demo

$(INSTALLED)-demo: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[demo]"
	@touch $@

demo: $(INSTALLED)-demo  ## Train a tiny model to use a tool across turns; the report goes to runs/demo.
	$(BIN)/agent-loop demo

test: $(INSTALLED)  ## Run the tests.
	$(BIN)/python -m pytest $(PARALLEL) $(SHOWN)

test-slow: $(INSTALLED)  ## Run the tests that take long: crashes, sandbox escapes, MCP servers, engines behind the gateway.
	$(BIN)/python -m pytest $(PARALLEL) -m slow $(RETRY)

nightly: check install-extras install-browser install-containers  ## Run everything: all cases of sweeps, all examples of properties, every suite, environments and verl included.
	$(BIN)/python -m pytest $(PARALLEL) -m "slow or not ($(OTHERS))" --hypothesis-profile=full --timeout=1200 --reruns 1 -rRs
	$(MAKE) test-engines test-ray test-integrations test-browser test-docs test-containers test-agents test-environments test-verl test-tinker

test-engines: test-vllm test-sglang  ## Run the tests of real engines (CPU builds), each in an environment of its own.

test-vllm test-sglang: test-%: $(VENV)-%/.installed
	$(VENV)-$*/bin/python -m pytest $(RETRY) tests/engines/test_$*_*.py

install-ray: $(INSTALLED)-ray

install-integrations: $(INSTALLED)-trl $(INSTALLED)-mlflow $(INSTALLED)-wandb

install-docs: $(INSTALLED)-docs

install-extras: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev,$(EXTRAS)]"
	@touch $(EXTRAS_INSTALLED)

install-browser: $(INSTALLED)-browser
	bash tests/viewer/install_browser.sh

install-containers:
	bash tests/workspaces/install_containers.sh

test-ray: install-ray  ## Run the tests that start Ray clusters; takes minutes and 4 GB of memory.
	$(BIN)/python -m pytest -m ray $(RETRY) tests/distributed

test-integrations: install-integrations  ## Run the tests with other libraries: TRL, MLflow, W&B.
	$(BIN)/python -m pytest -m integrations $(RETRY) tests/integrations tests/tracing tests/training

test-browser: install-browser  ## Run the tests of the viewer in a headless browser.
	$(BIN)/python -m pytest -m browser $(RETRY) tests/viewer

test-agents: $(VENV)-agents/.installed install-containers  ## Run agents that others wrote (Claude Code, Codex, ...) on the gateway, in an environment of their own (3 GB).
	$(VENV)-agents/bin/python -m pytest -m agents $(RETRY) tests/agents

test-environments: $(VENV)-environments/.installed  ## Play environments that others wrote, in an environment of their own (3 GB).
	$(VENV)-environments/bin/python -m pytest -m environments $(RETRY) tests/environments

test-verl: $(VENV)-verl/.installed  ## Run rollouts inside verl's trainer, in an environment of its own (3 GB).
	$(VENV)-verl/bin/python -m pytest -m verl -W default $(RETRY) tests/verl

test-tinker: $(VENV)-tinker/.installed  ## Run Tinker's SDK against `agent-loop tinker`, in an environment of its own (2 GB).
	$(VENV)-tinker/bin/python -m pytest -m tinker -W default $(RETRY) tests/tinker

test-containers: install-containers  ## Run the tests in containers of Podman; installs it with apt-get.
	$(BIN)/python -m pytest -m containers $(RETRY) tests/environments/test_harbor.py tests/examples tests/workspaces

offline: $(BIN)/python  ## Write build/offline: all that checks the package on a GPU without a network; see docs/gpu.md.
	bash benchmarks/gpu/make_offline.sh $(BIN)/python

test-gpu: $(INSTALLED)  ## Check the package on a GPU in stages, and print a table of verdicts; see docs/gpu.md.
	$(BIN)/python -m benchmarks.gpu

$(EXTRAS_INSTALLED): $(INSTALLED)-%: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev,$*]"
	@touch $@

$(VENV)-agents/.installed: tests/agents/install_agents.sh pyproject.toml
$(VENV)-environments/.installed: tests/environments/install_environments.sh pyproject.toml
$(VENV)-verl/.installed: benchmarks/install_verl.sh pyproject.toml
$(VENV)-tinker/.installed: tests/tinker/install_tinker.sh pyproject.toml
$(VENV)-agents/.installed $(VENV)-environments/.installed $(VENV)-verl/.installed $(VENV)-tinker/.installed:
	rm -rf $(@D)
	PYTHON=$(PYTHON) bash $< $(@D)
	@touch $@

$(VENV)-%/.installed: tests/engines/install_%.sh pyproject.toml
	rm -rf $(@D)
	PYTHON=$(PYTHON) bash $< $(@D)
	@touch $@

check: $(INSTALLED)  ## Check format, lint, types and import layers.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

format: $(INSTALLED)  ## Format the code and fix simple lint.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(INSTALLED)  ## Run the benchmarks; they print ratios; one that misses its target does not stop the others.
	-$(BIN)/python benchmarks/bench_embedded_engine.py
	-$(BIN)/python benchmarks/bench_encoding.py
	-$(BIN)/python benchmarks/bench_encoder.py
	-$(BIN)/python benchmarks/bench_batch.py
	-$(BIN)/python benchmarks/bench_overhead.py --quick
	-$(BIN)/python benchmarks/bench_turn_cost.py --quick
	-$(BIN)/python benchmarks/bench_makespan.py --quick
	-$(BIN)/python benchmarks/bench_memory.py
	-$(BIN)/python benchmarks/bench_weight_transfer.py
	-$(BIN)/python benchmarks/bench_journal.py
	-$(BIN)/python benchmarks/bench_sandbox.py
	-$(BIN)/python benchmarks/bench_tracing.py
	-$(BIN)/python benchmarks/bench_async.py
	-$(BIN)/python benchmarks/bench_prefix_tree.py
	-$(BIN)/python benchmarks/bench_update_memory.py
	-$(BIN)/python benchmarks/bench_plan.py
	-$(BIN)/python benchmarks/bench_trl.py

bench-verl: $(INSTALLED)-ray $(VENV)-verl/.installed  ## Measure the overhead against verl, in one process and under Ray, in an environment of its own (3 GB).
	PYTHON=$(PYTHON) $(BIN)/python benchmarks/bench_overhead.py --environment $(VENV)-verl
	PYTHON=$(PYTHON) $(BIN)/python benchmarks/bench_overhead_ray.py --environment $(VENV)-verl
	$(VENV)-verl/bin/python benchmarks/bench_verl_manager.py

docs: install-docs  ## Build the documentation into build/docs.
	$(BIN)/python docs/generate_reference.py
	$(BIN)/python docs/generate_metrics.py
	$(BIN)/python docs/generate_templates.py
	$(BIN)/python docs/generate_diagrams.py
	$(BIN)/zensical build --strict --clean
	@echo "open build/docs/index.html"

test-docs: docs install-browser  ## Check the built documentation in a headless browser without a network: links, width, search.
	$(BIN)/python -m pytest -m browser $(RETRY) tests/docs

clean:  ## Remove everything that the targets created, including .venv.
	rm -rf $(VENV) $(VENV)-* build dist runs .cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
