# On a fresh machine, make demo and make test first do all set-up. PYTHON chooses the interpreter that builds .venv.
PYTHON ?= python3
# What pip installs if the interpreter has no torch. Pinned, so that everybody begins with the same.
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
NPROC ?= 2
SAMPLE := data/sample
# Worker processes of the tests: one more than there are cores is good, because tests wait for processes that they start.
# Each takes 2 GB of memory. The tests of one file stay in one worker. Whole training runs keep more cores busy.
WORKERS ?= 3
test-night: WORKERS = 2
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# Where bytecode is switched off, as in some containers, each process would compile all of titan-disp and of the tests.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo gpu figure evidence test test-fast test-night test-peers slurm-test mutants lint format docs clean

setup: $(VENV)/.ready

# If the interpreter already has torch (as in a GPU image or a cluster's module), that torch is used and never replaced.
# .venv shows the packages of the system and, through a .pth file, those of the virtual environment that PYTHON may be in.
# If it is in .venv itself, which is then activated, .venv is kept as it is: an environment that is made from itself would
# show the packages of the system, too.
$(VENV)/.ready: pyproject.toml
	@echo "Installing into $(VENV): this takes a few minutes, and 3 GB of disk, or 6 GB if pip finds a CUDA build of torch."
	@if $(PYTHON) -c "import os, sys; sys.exit(not os.path.samefile(sys.prefix, '$(VENV)'))" 2>/dev/null; then \
	  echo "$(VENV) is activated, and is kept."; \
	elif $(PYTHON) -c "import torch" 2>/dev/null; then \
	  $(PYTHON) -m venv --system-site-packages $(VENV) && \
	  packages=$$($(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))") && \
	  $(PYTHON) -c "import site, sys; print(*site.getsitepackages() * (sys.prefix != sys.base_prefix), sep='\n')" \
	    > "$$packages/torch-of-python.pth"; \
	else \
	  $(PYTHON) -m venv $(VENV); \
	fi
	@# Environments that uv makes have no pip.
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(BIN)/python -m ensurepip --default-pip
	@$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet -e ".[all]"
	@# torchtitan imports triton. GPU builds of torch include it, and the CPU build does not.
	$(BIN)/python -c "import triton" 2>/dev/null || $(BIN)/python -m pip install --quiet -e ".[cpu]"
	@touch $@

$(SAMPLE)/README.md: | setup
	$(BIN)/titan-disp sample-data $(SAMPLE)

demo: setup $(SAMPLE)/README.md
	$(BIN)/titan-disp train train_configs/demo_cpu.toml --nproc $(NPROC)

# Checks and measures on all GPUs of this machine what docs/verification.md lists as not verified, or in small on a CPU.
# TITAN_DISP_STAGES="fsdp tp" runs only these stages of benchmarks/first_run.toml.
gpu: setup $(SAMPLE)/README.md
	TITAN_DISP_PYTHON=$(BIN)/python env -u SLURM_JOB_ID bash slurm/first_run.sbatch train_configs/qwen3_0.6b_c4.toml \
	  --training.dataset_path=$(SAMPLE) --model.hf_assets_path=$(SAMPLE)/tokenizer --stream.separator='</s>' \
	  --training.global_batch_size=-1 --parallelism.data_parallel_replicate_degree=1 --parallelism.data_parallel_shard_degree=-1 \
	  --job.dump_folder=outputs/gpu

# Writes docs/condensation.png and .json from six runs: dispersion off and on, with three seeds. Complete runs in
# outputs/figure are kept.
figure: setup $(SAMPLE)/README.md
	$(BIN)/python -m benchmarks.figure --nproc $(NPROC)

# Checks every number of docs/evidence.md, from docs/evidence.jsonl and docs/preregistered.csv, and writes its pictures and
# docs/evidence.csv.
evidence: setup
	$(BIN)/python -m benchmarks.evidence
	$(BIN)/python -m benchmarks.evidence_pictures

# The text of train_configs/evidence.toml. Downloads 70 MB of Debian's packages with apt-get.
data/evidence/README.md: | setup
	$(BIN)/python -m benchmarks.corpus data/evidence

test: setup
	$(PYTEST) -m "not night"

test-fast: setup
	$(PYTEST) -m "not slow and not night"

# Tests of whole runs: NaN, full disks, damaged checkpoints and signals; also large meshes, sweeps, benchmarks and the figure.
# NIGHT_PART=1/3 runs only the first of every three tests with parameters, and all others.
test-night: setup
	$(PYTEST) -m night

# Compares with packages that others wrote: lm_eval's own command line, torch's conversion of checkpoints, pytorch-metric-learning,
# and the authors' package (7 kB). The licence of the last, Yale's, is for non-commercial use only, so nothing else installs it:
# make test compares with numbers that it gave. It requires an older transformers, but works with ours, hence --no-deps.
test-peers: setup
	$(BIN)/python -m pip install --quiet --no-deps "embedding-condensation==2.0" "IsoScore==2.0.1" nltk pytorch-metric-learning
	$(BIN)/python -m pytest tests/peers tests/test_condensation.py

# Runs a real SLURM with four nodes on this machine. It is installed if it is missing (Debian or Ubuntu, as root), and
# stopped at the end.
slurm-test: setup
	$(BIN)/python -m pytest tests/slurm

# Finds small wrong edits of a room (tests/mutants.py lists the rooms) that its fast tests do not notice: make mutants
# ROOM=measure. Small rooms take minutes, and large ones hours. ARGS=--again tries the survivors of the last run
# again. ROOM=reach measures which test files run a line; then ARGS=--elsewhere tries survivors against all of these.
mutants: setup
	@$(BIN)/python -c "import mutmut" 2>/dev/null || $(BIN)/python -m pip install --quiet -e ".[mutants]"
	$(BIN)/python -m tests.mutants $(ROOM) $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/shellcheck slurm/*.sh slurm/*.sbatch slurm/sites/*.sh .ci/run

# Writes the pages and the reference of the Python interface as a site in build/site. A broken link is an error.
# This needs neither torch nor titan-disp's other packages.
docs: $(VENV)-docs/.ready
	NO_MKDOCS_2_WARNING=1 $(VENV)-docs/bin/mkdocs build --strict --quiet --site-dir build/site

$(VENV)-docs/.ready: docs/requirements.txt
	$(PYTHON) -m venv $(VENV)-docs
	$(VENV)-docs/bin/python -m pip install --quiet -r docs/requirements.txt
	@touch $@

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(VENV)-docs build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
