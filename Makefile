# Two commands: `make demo` and `make test`. Each sets up its own virtual environment first.

PYTHON ?= python3
RUN    ?= runs/digits
BIN    := .venv/bin
PY     := $(BIN)/python

.PHONY: demo test check experts expert-0 expert-1 expert-2 expert-3 clean

# Installed once, and again whenever the dependencies change.
.venv/installed: pyproject.toml
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 10))" || \
	  { echo "ddm_min needs Python 3.10 or newer: make PYTHON=/path/to/python3.12"; exit 2; }
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

# Partition -> isolated experts -> router -> samples -> pictures and a distance.
demo: .venv/installed
	$(PY) -m ddm_min.partition --data digits --clusters 4 --run $(RUN)
	@$(MAKE) --no-print-directory -j2 experts
	$(PY) train_router.py --data digits --run $(RUN)
	$(PY) sample.py $(RUN) --num 100 --out $(RUN)/samples.png
	$(PY) sample.py $(RUN) --num 1000 --out $(RUN)/samples.npz
	$(PY) -m ddm_min.figures losses --run $(RUN)
	$(PY) -m ddm_min.figures routing --run $(RUN) --data digits
	$(PY) -m ddm_min.fid $(RUN)/samples.npz digits --out $(RUN)/frechet.json
	@echo "Done. Look at $(RUN)/samples.png (a row per class), clusters.png, routing.png, losses.png."

# Four islands that never meet: two at a time, one thread each, on two cores.
experts: expert-0 expert-1 expert-2 expert-3
expert-0 expert-2: OBJECTIVE = ddpm
expert-1 expert-3: OBJECTIVE = flow
expert-1 expert-3: export TQDM_POSITION = 1
expert-0 expert-1 expert-2 expert-3: export OMP_NUM_THREADS = 1
expert-0 expert-1 expert-2 expert-3: expert-%:
	$(PY) train_expert.py --data digits --run $(RUN) --cluster $* --objective $(OBJECTIVE)

test: .venv/installed
	$(PY) -m pytest

# What CI runs before the tests: linter, format, line budgets.
check: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(PY) tests/line_budgets.py

clean:
	rm -rf .venv runs
