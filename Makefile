# Everything a checkout needs: each target sets itself up (needs python3 >= 3.11 with venv, make and a C compiler).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
OUT ?= isoloss-quickstart
EXTRAS ?= dev,fast,postgres
# CI runs everything; a person's `make test` leaves out what takes minutes.
ifeq ($(CI),true)
MARKS :=
else
MARKS := -m "not slow and not slurm"
endif

.PHONY: help venv quickstart test test-all lint clean

help:
	@echo "make quickstart   train a tiny real sweep on this machine, analyse it, write the report (about 5 minutes)"
	@echo "make test         tests that take minutes altogether; CI=true runs all"
	@echo "make test-all     all tests, the slow ones and those on a real Slurm included"
	@echo "make lint         what CI and pre-commit check: ruff, ruff format, mypy"
	@echo "make venv         only install, into .venv"
	@echo "make clean        remove .venv and caches"

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "python 3.11 or newer is needed; set PYTHON=" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt "torch==2.13.0"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[$(EXTRAS)]"
	touch $(STAMP)

venv: $(STAMP)

quickstart: $(STAMP)
	$(BIN)/scaling quickstart --out $(OUT)

test: $(STAMP)
	$(BIN)/python -m pytest $(MARKS) $(ARGS)

test-all: $(STAMP)
	$(BIN)/python -m pytest $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
