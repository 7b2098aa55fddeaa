# Everything a developer does. The work is in scripts/; set-up is repeated only when it must be.
.DEFAULT_GOAL := help
.PHONY: help demo check check-fast chaos bench db-up db-down psql clean

PYTHON := .venv/bin/python
DATABASE := $(PYTHON) -m jobq.embedded

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 12

demo: ## watch jobq work: 2,000 e-mails, two workers, one of them killed (DATABASE_URL: on that server)
	@scripts/setup demo
	@.venv/bin/jobqctl demo $(ARGS)

check: ## linters, types, and all tests on all versions; what CI runs
	@scripts/setup dev
	@scripts/get-pgbouncer
	@scripts/check

check-fast: ## the same without the slow tests and the other versions
	@scripts/setup dev
	@scripts/get-pgbouncer
	@scripts/check fast

chaos: ## every fault under load, minutes each, audited, and the fuzzer; ARGS="-k failover", JOBQ_LONG_MINUTES=10
	@scripts/setup dev
	@scripts/get-pgbouncer
	@scripts/get-libfaketime
	@scripts/get-etcd
	@scripts/setup patroni .venvs/patroni
	@JOBQ_LONG=1 $(PYTHON) -m pytest -s -m "slow or fuzz" -p no:randomly -o timeout=3600 \
		tests/test_chaos_*.py tests/test_fuzz_*.py $(ARGS)

bench: ## benchmarks; choose with ARGS="drain --quick"
	@scripts/setup dev
	@$(PYTHON) -m bench $(ARGS)

db-up: ## start a PostgreSQL for development in .db, and print its address
	@scripts/setup demo
	@$(DATABASE) start --dir .db

db-down: ## stop it; its data stay
	@scripts/setup demo
	@$(DATABASE) stop --dir .db

psql: ## psql on it, started if need be
	@scripts/setup demo
	@$(DATABASE) start --dir .db >/dev/null
	@$(DATABASE) psql --dir .db

clean: ## remove all that make has made, the development database too
	@if [ -x $(PYTHON) ] && [ -d .db/data ]; then $(DATABASE) stop --dir .db; fi
	rm -rf .venv .venvs .db build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
