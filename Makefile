# Everything runs in .venv, which the first target that needs it makes.
PYTHON ?= python3
BIN := .venv/bin
PROCESSES ?= 4
CORES ?= 2
INSTALLED := .venv/installed
GIRIH := .venv/girih
GPU_PYTHON ?= $(PYTHON)
CHECK_PYTHON := import sys; sys.exit('make: needs Python 3.11 or later; PYTHON=... names one' if sys.version_info < (3, 11) else 0)

.PHONY: setup lint size prose api test test-newest test-oldest test-slow test-gpu test-all gpu gpu-list gpu-picasso bench bench-peers claims demo docs test-docs clean

setup: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || { $(PYTHON) -c "$(CHECK_PYTHON)" && $(PYTHON) -m venv .venv; }
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,tensorboard]'
	touch $@

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(MAKE) size prose api

# Ratchets: how large the code may be, and how odd its English. --lower takes the limits of dev/limits.json down.
size:
	$(PYTHON) dev/size.py

prose:
	$(PYTHON) dev/prose.py --worst 0

# Changes of the public names, compared with dev/api.txt.
api: setup
	$(BIN)/python dev/api.py

# PROCESSES files at a time, each in one process. Two for each of two cores: a third of the time with one for each is waiting
# for processes that start, and for each other. Idle threads sleep at once: spinning, they would take the cores from the other
# file's (four times as long for tests of whole models). Without the JIT nothing waits: one for each core, since each imports torch.
# Bytecode is kept: each process that a test starts would compile girih anew otherwise.
PYTEST := PYTHONDONTWRITEBYTECODE= GOMP_SPINCOUNT=0 $(BIN)/pytest --numprocesses $(PROCESSES) --dist loadfile --no-loadscope-reorder --durations 25
PLAIN := tests/kernels tests/store tests/sparse/test_sparse_kernels.py

test: setup
	$(PYTEST) -m "not slow and not heavy and not gpu"

# Whole runs of several processes, kills, restarts; and kernels without the JIT.
test-slow: setup
	$(PYTEST) -m "slow and not heavy and not gpu"
	NUMBA_DISABLE_JIT=1 $(PYTEST) --numprocesses $(CORES) -m "not heavy and not gpu" $(PLAIN)

# The rooms that need no torch, with the newest Python and packages, then with Python 3.11 and the oldest packages that
# pyproject.toml allows. NEWEST=1 and OLDEST=1 look for versions again and pin them.
test-newest:
	PROCESSES=$(PROCESSES) $(PYTHON) dev/versions.py newest $(if $(NEWEST),--refresh)

test-oldest:
	PROCESSES=$(PROCESSES) $(PYTHON) dev/versions.py oldest $(if $(OLDEST),--refresh)

# One small test or more for each GPU kernel, and one training, interpreted where there is no GPU. test-all interprets all GPU tests.
test-gpu: setup
	$(PYTEST) -m "gpu and smoke"

test-all: setup
	GIRIH_KILLS=50 GIRIH_STEPS=200 GIRIH_MANY=1000000 GIRIH_FUZZED=2100 $(PYTEST)
	NUMBA_DISABLE_JIT=1 $(PYTEST) --numprocesses $(CORES) -m "not gpu" $(PLAIN)

# On a machine with a GPU, without a network: tests of compiled kernels and figures, in stages with time limits. It uses an
# interpreter that has torch and the other packages, and installs nothing. dev/gpu_stages.py describes its variables:
# GPU_PYTHON, GPU_OUT, GPU_STAGES, GPU_PATIENCE, GPU_INTERPRET.
gpu gpu-picasso: export GPU_PYTHON := $(GPU_PYTHON)
gpu-picasso: export PYTHONPATH := $(CURDIR)/src

gpu:
	@$(PYTHON) dev/gpu_stages.py

gpu-list:
	@$(PYTHON) dev/gpu_stages.py --list

# On a machine with a GPU: PICASSO's tables of speeds with rows in GPU memory, one trainer.
gpu-picasso:
	$(GPU_PYTHON) -m girih bench picasso_table4 --gpu
	$(GPU_PYTHON) -m girih bench picasso_table6 --gpu --data zipf
	$(GPU_PYTHON) -m girih bench picasso_table7 --gpu
	$(GPU_PYTHON) -m girih bench picasso_table8 --gpu

bench: setup
	$(BIN)/girih bench kernels
	$(BIN)/girih bench train

bench-peers: setup
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[bench]'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps torchrec

# Hours: what has no result by the present code below docs/results is trained, or measured, which takes a machine that
# does nothing else; where links are slow, as root. Those with --json are one file without a tag of the code, and are
# measured again whole each time. Each command is that of its page. Left out, as they are no paper's claims: kernels and
# train (`make bench`), thresholds, capacity, tiers, ssd_reads and wide_features (memory and disks of their own size), and
# recipes/quality.py and recipes/precision.py (hours each).
claims: setup
	$(BIN)/girih bench strategy_quality
	$(BIN)/girih bench persia_theorem1
	$(BIN)/girih bench stream
	$(BIN)/girih bench des_table2 --models lr dnn deepfm --steps 20 --json docs/results/des-table2.json
	$(BIN)/girih bench des_table5
	$(BIN)/girih bench persia_balance --json docs/results/persia-balance.json
	$(BIN)/girih bench persia_wire --rounds 1 --rates 1gbit --compression-rates
	$(BIN)/girih bench persia_wire --rounds 1 --rates 200mbit --staleness 0 4 8 16 --compressions none all
	$(BIN)/girih bench persia_fig8 --rounds 1 --json docs/results/persia-fig8.json
	$(BIN)/girih bench persia_fig9
	$(BIN)/girih bench persia_fig6 --rates 1gbit
	$(BIN)/girih bench persia_gantt --svg docs/persia-gantt.svg --json docs/results/persia-gantt.json
	$(BIN)/girih bench picasso_table3
	$(BIN)/girih bench picasso_table4
	$(BIN)/girih bench picasso_table5 --json docs/results/picasso-table5.json
	$(BIN)/girih bench picasso_table6
	$(BIN)/girih bench picasso_table7
	$(BIN)/girih bench picasso_table8 --rounds 1
	$(BIN)/girih bench picasso_fig15 --rounds 1
	$(BIN)/girih bench hierarchical_quality
	$(BIN)/girih bench hierarchical_speed --calibration docs/results/prediction/calibration.json
	$(BIN)/girih bench hierarchical_scale --calibration docs/results/prediction/calibration.json
	$(BIN)/girih bench paper_sizes --json docs/results/paper-sizes.json

# Without the tools that tests need, where these are not there yet.
demo: $(if $(wildcard $(INSTALLED)),$(INSTALLED),$(GIRIH))
	$(BIN)/girih demo

$(GIRIH): pyproject.toml constraints.txt
	test -x $(BIN)/python || { $(PYTHON) -c "$(CHECK_PYTHON)" && $(PYTHON) -m venv .venv; }
	@echo 'installing girih and what it needs into .venv, torch among it: some minutes'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[report]'
	touch $@

# The site, in site/: README.md and docs/, with pages for each public name, config key and command. A broken link fails it.
docs: setup
	$(BIN)/python dev/build_docs.py

test-docs: setup
	$(BIN)/pytest tests/docs

clean:
	rm -rf .venv .venv-newest .venv-oldest build dist site runs demo-run .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
