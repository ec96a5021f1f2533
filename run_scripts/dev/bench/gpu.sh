#!/usr/bin/env bash
# Measures one GPU (ten.py, ten minutes) into docs/<device>-<date>.jsonl. Where setup.sh has not made .venv, it
# takes python3 with what that finds. Arguments go to ten.py; --small tries the code on a CPU.
set -euo pipefail
cd "$(dirname "$0")/../../.."
python=.venv/bin/python
[ -x "$python" ] || python=python3
device=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -n 1 | tr ' ' '-' || true)
exec "$python" -m run_scripts.dev.bench.ten --out "docs/${device:-CPU}-$(date -u +%F).jsonl" "$@"
