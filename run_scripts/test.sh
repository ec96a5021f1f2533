#!/usr/bin/env bash
# The whole test suite with linter and type checker; arguments go to pytest (-m "not process and not night" is quick).
set -euo pipefail
cd "$(dirname "$0")/.."
run_scripts/setup.sh
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
.venv/bin/python -m run_scripts.dev.code_metrics
.venv/bin/python -m pytest -n 2 --dist loadscope --no-loadscope-reorder "$@"
