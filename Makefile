# make lab | test | test-more | test-all | kernels | test-torch | bench | gpu | site | refresh | lock.  The first run installs everything into .venv, later ones start at once.
# Linux without a GPU: `make lab TORCH_INDEX=https://download.pytorch.org/whl/cpu` leaves out 3 GB of CUDA packages.
PYTHON ?= python3
TORCH_INDEX ?=

# What meets torch.distributed's inside.
CORE_TESTS := $(foreach name,collectives ddp debug explain fast_buckets foreign hang launch launch_failures link \
	parameter_server pipeline processes pytorch_inside records reports schedules stuck_scripts tensor_parallel \
	torch_pipelining torchrun trace training transport wire zero,tests/test_$(name).py)

BIN := .venv/$(if $(filter Windows_NT,$(OS)),Scripts,bin)
ROOT_FLAG := $(if $(filter 0,$(shell id -u)),--allow-root)
# Every launch starts fresh ranks: without .pyc files each would compile what it imports.
export PYTHONDONTWRITEBYTECODE :=
.PHONY: lab test test-more test-all kernels test-torch bench gpu site refresh lock

lab: .venv/ready
	$(BIN)/python scripts/working_copy.py
	$(BIN)/python -m jupyterlab --ip=127.0.0.1 --LabApp.default_url=/lab/tree/my_notebooks/00_start_here.ipynb $(ROOT_FLAG)

test: WHICH := -m "not slow and not wide"
test test-all: .venv/ready
	$(BIN)/python -m ruff check . && $(BIN)/python -m ruff format --check .
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder $(WHICH)
	$(if $(WHICH),,$(BIN)/python scripts/kernels.py all -m numeric)

# What `make test` leaves out for its length, and the numeric tests again, with another processor's kernels.
test-more: .venv/ready
	$(BIN)/python scripts/kernels.py turn -m "(numeric or wide) and not slow"

# Numeric tests with the kernels of another processor: PICK=haswell, zen, oldest, skylake, turn or all.
kernels: PICK := turn
kernels: .venv/ready
	$(BIN)/python scripts/kernels.py $(PICK)

# make test-torch VERSION=2.15.0 [CORE=1]: with another torch, in an environment of its own.
test-torch: OTHER := .venv-torch-$(VERSION)
test-torch: OTHERS := $(OTHER)/$(notdir $(BIN))/python
test-torch:
	@test -n "$(VERSION)" || { echo "make test-torch expects a version: make test-torch VERSION=2.15.0" >&2; exit 1; }
	$(PYTHON) -m venv $(OTHER)
	grep -vE '^(torch|triton|setuptools)==' constraints.txt > $(OTHER)/constraints.txt
	$(if $(TORCH_INDEX),$(OTHERS) -m pip install --index-url $(TORCH_INDEX) --no-deps torch==$(VERSION))
	$(OTHERS) -m pip install --constraint $(OTHER)/constraints.txt torch==$(VERSION) --editable ".[course,test]"
	$(OTHERS) -m pytest -n 3 --dist loadfile --no-loadscope-reorder -m "not slow" $(if $(CORE),$(CORE_TESTS))

bench: .venv/ready
	$(BIN)/python -m ddpkit.bench

# With the Python that is there: a machine with a GPU has a torch of its own.
gpu:
	PYTHONPATH=$(CURDIR) $(if $(wildcard .venv/ready),$(BIN)/python,$(PYTHON)) scripts/gpu.py

site: .venv/ready
	$(BIN)/python scripts/pages.py

refresh: .venv/ready
	$(BIN)/python scripts/refresh.py

lock: .venv/ready
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/python scripts/lock.py

.venv/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c "import sys; sys.version_info >= (3, 11) or sys.exit('ddpkit needs Python 3.11 or newer, and $(PYTHON) is ' + sys.version.split()[0] + '. Name a newer one: make PYTHON=python3.12')"
	$(PYTHON) -m venv .venv
	$(if $(TORCH_INDEX),$(BIN)/python -m pip install --index-url $(TORCH_INDEX) --no-deps --constraint constraints.txt torch)
	$(BIN)/python -m pip install --constraint constraints.txt --editable ".[course,test]"
	@echo ready > $@
