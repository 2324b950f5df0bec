# `make demo` and `make test` set up .venv themselves. On a machine with GPUs: make demo EXTRA=gpu
PYTHON ?= $(shell command -v python3.11 || command -v python3)
EXTRA ?= cpu
# Where torch's CPU wheels are looked for when the configured package index has none.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
BIN := .venv/bin
READY := .venv/.ready-$(EXTRA)

.PHONY: setup demo demo-short pipeline bench test chaos evidence install-check reference lint clean
setup: $(READY)

$(READY): pyproject.toml launch/setup.sh
	EXTRA=$(EXTRA) PYTHON=$(PYTHON) TORCH_INDEX=$(TORCH_INDEX) bash launch/setup.sh
	touch $@

demo: $(READY)
	$(BIN)/grpo-dist train configs/demo.yaml checkpoint.resume=never $(ARGS)

demo-short: $(READY)
	$(BIN)/grpo-dist train configs/demo.yaml checkpoint.resume=never name=demo-short steps=4 \
	    data.eval.0.max_rows=64 $(ARGS)

# The stages of DeepSeek-R1 on the demo's problems; goes on where it was interrupted.
pipeline: $(READY)
	$(BIN)/grpo-dist pipeline configs/pipelines/r1_demo.yaml $(ARGS)

# How fast the loop is on this machine, and how near to what it can do: make bench BENCH=configs/bench/gpu_0.5b.yaml
BENCH ?= configs/bench/cpu_13m.yaml
bench: $(READY)
	$(BIN)/grpo-dist bench $(BENCH) $(ARGS)

# $(call both,FIRST,SECOND) runs both commands, whatever the first one returns, and fails if either failed. pytest returns
# 5 where ARGS select no test: one of the two may have none.
define both
@trap 'exit 130' INT; first=0; second=0; set -x; \
$(1) || first=$$?; \
$(2) || second=$$?; \
{ set +x; } 2> /dev/null; \
case $$first,$$second in 0,0 | 0,5 | 5,0) ;; *) echo "failed: exit codes $$first and $$second"; exit 1 ;; esac
endef

# Tests that start engines, ranks or clusters are the second half. More processes than these are no faster on two cores.
test: $(READY)
	$(call both,$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder -m "not evidence and not machine" $(ARGS),\
	    $(BIN)/python -m pytest -n 2 --dist loadfile -m "machine and not evidence" $(ARGS))

# A real job whose parts are killed, hung, cut off and starved, 20 events of each kind: hours on two cores. A
# shorter one: make chaos ARGS="--each 2 --only 'SIGKILL rollout' --only 'disk full'"
chaos: $(READY)
	$(BIN)/python -m tests.chaos $(ARGS)

# Whole runs that learn, one that must not, a whole recipe that is killed, all cases of tests that draw theirs, and what
# else takes long: hours on two cores.
evidence: $(READY)
	GRPO_DIST_TEST_SEED=all $(BIN)/python -m pytest -s -m evidence tests $(ARGS)

# The steps of the image in a clean copy of this checkout: what launch/setup.sh installs is complete and works.
install-check: $(READY)
	$(BIN)/python -m pytest -m evidence tests/repository/test_docker.py $(ARGS)

# What is made from the code: the page of every key (configs/README.md) and the metric catalogue.
reference: $(READY)
	$(BIN)/python -m grpo_dist.tools.config_reference
	$(BIN)/python -m grpo_dist.observe.catalogue

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python launch/check_waits.py grpo_dist actors
	$(BIN)/shellcheck launch/*.sh launch/slurm.sbatch docker/*.sh .ci/run
	$(BIN)/hadolint docker/Dockerfile docker/Dockerfile.cpu

clean:
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache
