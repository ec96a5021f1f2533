#!/usr/bin/env bash
# Measures one GPU in under eight minutes and writes docs/benchmarks/<device>-<date>.json. Where setup.sh has not made
# .venv, it takes python3 with what that finds.
#
#   run_scripts/bench/gpu.sh [options of run_scripts/bench/gpu.py, such as --parts learner --seconds 200]
set -euo pipefail
cd "$(dirname "$0")/../.."
if ! command -v nvidia-smi >/dev/null; then echo "gpu.sh: no nvidia-smi, so no GPU to measure" >&2; exit 2; fi
device=$(nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1 | tr ' ' '-')
mkdir -p docs/benchmarks
python=.venv/bin/python
[ -x "$python" ] || python=python3
exec "$python" -m run_scripts.bench.gpu --out "docs/benchmarks/$device-$(date -u +%F).json" "$@"
