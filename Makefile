# make run       the whole product on this machine: web, worker, gateway, engine servers
# make optimise  the main job in a terminal; writes report.json
# make test      lint, import rules, tests (under 20 minutes)
# make test-all  the slow ones too
# make bench     benchmarks: make bench NAME=swap

PYTHON ?= python3
VENV := $(or $(POLYMORPH_VENV),.venv)
PY := $(VENV)/bin/python
HOST ?= 127.0.0.1
PORT ?= 8000
GATEWAY_PORT ?= 8100
DATA ?= data
MODEL ?= demo
TRAFFIC ?= demo
BUDGET ?= 5m
OUT ?= report.json
NAME ?=

.PHONY: run optimise test test-all test-services lint bench env env-dev screenshots

env:
	@$(PYTHON) bootstrap.py

env-dev:
	@$(PYTHON) bootstrap.py --dev

run: env
	@$(PY) manage.py serve --data $(DATA) --host $(HOST) --port $(PORT) --gateway-port $(GATEWAY_PORT)

optimise: env
	@$(PY) -m optimizer --model $(MODEL) --traffic $(TRAFFIC) --budget $(BUDGET) --data $(DATA) --out $(OUT)

lint: env-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/lint-imports --config pyproject.toml

# The first four folders need neither ports nor a database of their own, so two of their tests run side by side.
SIDE_BY_SIDE := tests/kernels tests/engine tests/optimizer tests/contracts

test: lint
	$(PY) -m pytest -n 2 --durations=40 -m "not slow" $(SIDE_BY_SIDE)
	$(PY) -m pytest -m "not slow" tests $(SIDE_BY_SIDE:%=--ignore=%)
	@$(MAKE) --no-print-directory test-services

test-all: lint
	$(PY) -m pytest -n 2 $(SIDE_BY_SIDE)
	$(PY) -m pytest tests $(SIDE_BY_SIDE:%=--ignore=%)
	@$(MAKE) --no-print-directory test-services

# The web's tests once more on PostgreSQL and Redis, by settings alone, where the two addresses are given.
test-services: env-dev
	@if [ -n "$$TEST_DATABASE_URL" ] && [ -n "$$TEST_REDIS_URL" ]; then \
	  DATABASE_URL="$$TEST_DATABASE_URL" CELERY_BROKER_URL="$$TEST_REDIS_URL/0" CHANNEL_REDIS_URL="$$TEST_REDIS_URL/1" \
	    $(PY) -m pytest tests/web -m "not slow"; \
	else echo "TEST_DATABASE_URL and TEST_REDIS_URL are not set: the web's tests ran on SQLite and the embedded queue only."; fi

bench: env-dev
	@$(PY) -m tests.bench $(NAME)

screenshots: env-dev
	@$(PY) -m tests.e2e.screenshots
