# `make demo` and `make test` set up .venv themselves. On a machine with GPUs: make demo EXTRA=gpu, and without it from then on
PYTHON ?= $(shell command -v python3.11 || command -v python3)
# cpu or gpu; default: the existing .venv's.
EXTRA ?= $(or $(patsubst .venv/.ready-%,%,$(firstword $(wildcard .venv/.ready-*))),cpu)
# Index for torch's CPU wheels if the configured package index has none.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
BIN := .venv/bin
READY := .venv/.ready-$(EXTRA)
# Let Python cache bytecode: set-up compiles nothing, and the suite starts a thousand processes.
export PYTHONDONTWRITEBYTECODE :=

# Packages of other environments, for tests only: pinned, in a separate interpreter.
PACKAGES := .venv-packages/.ready

.PHONY: setup demo demo-short demo-real demo-tools pipeline bench gpu-check test test-all chaos evidence findings install-check reference lint clean
setup: $(READY)

$(READY): pyproject.toml launch/setup.sh $(wildcard docker/constraints-$(EXTRA).txt)
	EXTRA=$(EXTRA) PYTHON=$(PYTHON) TORCH_INDEX=$(TORCH_INDEX) bash launch/setup.sh
	touch $@

$(PACKAGES): launch/environment_packages.txt launch/environment_packages.sh $(READY)
	if bash launch/environment_packages.sh; then touch $@; else echo "not installed: their tests are skipped"; fi

demo: $(READY)
	$(BIN)/grpo-dist train configs/demo.yaml checkpoint.resume=never $(ARGS)

demo-short: $(READY)
	$(BIN)/grpo-dist train configs/demo.yaml checkpoint.resume=never name=demo-short steps=4 \
	    data.eval.0.max_rows=64 $(ARGS)

# A real pretrained model: two-digit sums after three examples. On two quiet cores 20 to 29 minutes, and 16 GiB of memory.
demo-real: $(READY)
	$(BIN)/grpo-dist train configs/smollm2_sums.yaml checkpoint.resume=never $(ARGS)

# Products with a calculator: the share of samples that call it rises, and with it the accuracy.
demo-tools: $(READY)
	$(BIN)/grpo-dist train configs/tools_demo.yaml checkpoint.resume=never $(ARGS)

# The stages of DeepSeek-R1 on the demo's problems; the same command resumes an interrupted one.
pipeline: $(READY)
	$(BIN)/grpo-dist pipeline configs/pipelines/r1_demo.yaml $(ARGS)

# Speed of the loop on this machine, and of each stage relative to its limit, some minutes per workload; without a
# GPU also of single parts, half an hour: PARTS= skips these, BENCH= skips the loop.
BENCH ?= $(if $(filter gpu,$(EXTRA)),configs/bench/gpu_0.5b.yaml,configs/bench/cpu_13m.yaml configs/bench/cpu_13m_lognormal.yaml)
PARTS ?= $(if $(filter gpu,$(EXTRA)),,first_minute engine_cost update_cost \
    "driver_scaling --samples 65536 --workers 8 --tables ray" "many_prompts --distinct 1800000")
bench: $(READY)
	for config in $(BENCH); do $(BIN)/grpo-dist bench $$config $(ARGS) || exit; done
	for part in $(PARTS); do $(BIN)/python -m tests.evidence.$$part || exit; done

# Checks this machine's GPUs, in at most 10 minutes: make gpu-check EXTRA=gpu. Without a GPU: ARGS=--rehearse
gpu-check: $(READY)
	$(BIN)/python -m pytest --confcutdir=tests/gpu -q -m gpu tests/gpu/test_gpu.py $(ARGS)

# Both halves of the suite in parallel, the same tests every time; test-all includes slow tests: hours on two cores.
test: $(READY) $(PACKAGES)
	$(BIN)/python -m tests.support.halves $(ARGS)

test-all: $(READY) $(PACKAGES)
	$(BIN)/python -m tests.support.halves --all $(ARGS)

# A real job whose processes are killed, stopped, cut off and starved, 20 events per kind: hours on two cores. Shorter:
# make chaos ARGS="--each 2 --only 'SIGKILL rollout' --only 'disk full'"
chaos: $(READY)
	$(BIN)/python -m tests.chaos $(ARGS)

# Whole runs that learn, a negative control, a recipe that is killed: hours on two cores.
evidence: $(READY) $(PACKAGES)
	$(BIN)/python -m pytest -s -m evidence tests $(ARGS)

# Behaviour of outside libraries, each in a separate environment: an hour. Before an upgrade: make findings ARGS="--latest"
findings:
	$(PYTHON) findings/run.py $(ARGS)

# Run the image's installation steps in a clean copy of this checkout, then check that they installed everything.
install-check: $(READY)
	$(BIN)/python -m pytest -m evidence tests/repository/test_docker.py $(ARGS)

# Regenerate the pages made from the code (every key) and from recorded results.
reference: $(READY)
	$(BIN)/python -m grpo_dist.tools.config_reference
	$(BIN)/python -m tests.evidence.learning_runs

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python launch/check_waits.py grpo_dist actors
	$(BIN)/shellcheck findings/*.sh launch/*.sh launch/slurm.sbatch docker/*.sh .ci/run
	$(BIN)/hadolint docker/Dockerfile docker/Dockerfile.cpu

clean:
	rm -rf .venv .venv-packages build *.egg-info .pytest_cache .mypy_cache .ruff_cache
