#!/usr/bin/env bash
# Linter, type checker and the test suite; arguments go to pytest (-m "not slow" leaves out the slow tests).
set -euo pipefail
cd "$(dirname "$0")/.."
run_scripts/setup.sh
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
.venv/bin/python -m pytest "$@"
