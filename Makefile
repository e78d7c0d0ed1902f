# make demo and make test do all set-up on a fresh machine; PYTHON chooses the interpreter to build .venv with.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
NPROC ?= 2
DATA := data/sample
PART ?= all
JOBS ?= 2

.PHONY: setup demo figure evidence test test-fast test-night test-authors slurm-test mutants lint format clean

setup: $(VENV)/.ready

# Where the interpreter has torch already (a GPU image, a cluster's module), that torch is used and never replaced.
# Where it has none, a pinned one is installed first: an open range would fetch the newest build with gigabytes of CUDA.
$(VENV)/.ready: pyproject.toml
	@if $(PYTHON) -c "import torch" 2>/dev/null; then \
	  $(PYTHON) -m venv --system-site-packages $(VENV); \
	else \
	  $(PYTHON) -m venv $(VENV) && $(BIN)/python -m pip install --quiet "torch==2.13.0"; \
	fi
	$(BIN)/python -m pip install --quiet -e ".[all]"
	@# torchtitan imports triton, which the CPU build of torch does not bring; GPU builds bring their own.
	$(BIN)/python -c "import triton" 2>/dev/null || $(BIN)/python -m pip install --quiet -e ".[cpu]"
	@touch $@

$(DATA)/README.md: | setup
	$(BIN)/titan-disp sample-data $(DATA)

demo: setup $(DATA)/README.md
	$(BIN)/titan-disp train train_configs/demo_cpu.toml --nproc $(NPROC)

# docs/condensation.*: six runs, dispersion off and on with three seeds. Complete runs in outputs/figure are not trained again.
figure: setup $(DATA)/README.md
	$(BIN)/python benchmarks/figure.py --nproc $(NPROC) --data $(DATA)

# docs/evidence.md: all runs of docs/evidence_design.md that are missing, JOBS at a time, one core each. Hours; it resumes.
evidence: setup data/evidence/README.md
	$(BIN)/python -m benchmarks.evidence --part $(PART) --jobs $(JOBS)

# 70 MB of Debian's packages, by apt-get.
data/evidence/README.md: | setup
	$(BIN)/python -m benchmarks.corpus data/evidence

test: setup
	$(BIN)/python -m pytest -m "not night"

test-fast: setup
	$(BIN)/python -m pytest -m "not slow and not night"

# Whole runs: NaN, full disks, damaged checkpoints and signals; imports, the figure and the report from the start.
test-night: setup
	$(BIN)/python -m pytest -m night

# Against the authors' package itself (7 kB). Its licence, Yale's, is for non-commercial use alone, so that nothing else installs it:
# make test compares with numbers that it gave. It asks for an older transformers, which it does not need: --no-deps.
test-authors: setup
	$(BIN)/python -m pip install --quiet --no-deps "embedding-condensation==2.0"
	$(BIN)/python -m pytest tests/test_averaged.py

# A real SLURM of four nodes on this machine: installed where it is missing (Debian or Ubuntu, root), stopped afterwards.
slurm-test: setup
	$(BIN)/python -m pytest tests/slurm

# Small wrong edits of a room (tests/mutants.py lists them) that its fast tests do not notice: make mutants ROOM=measure.
# Minutes for most, an hour for the loss; ARGS=--again tries the survivors of the last run once more.
mutants: setup
	@$(BIN)/python -c "import mutmut" 2>/dev/null || $(BIN)/python -m pip install --quiet -e ".[mutants]"
	$(BIN)/python -m tests.mutants $(ROOM) $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	@if command -v shellcheck >/dev/null; then shellcheck slurm/*.sh slurm/*.sbatch slurm/sites/*.sh; fi

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
