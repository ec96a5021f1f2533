#!/usr/bin/env bash
# Probes one GPU (first.py, at most ten minutes), then measures what the probes allow (gpu.py), and writes
# docs/benchmarks/<device>-<date>.json. Where setup.sh has not made .venv, it takes python3 with what that finds.
#
#   run_scripts/bench/gpu.sh [options of run_scripts/bench/gpu.py, such as --parts learner --seconds 200]
#   run_scripts/bench/gpu.sh --small     # tiny shapes, also on a CPU; the results go to a temporary folder
set -euo pipefail
cd "$(dirname "$0")/../.."
python=.venv/bin/python
[ -x "$python" ] || python=python3
if [[ " $* " == *" --small "* ]]; then
  results=$(mktemp -d)/small
elif command -v nvidia-smi >/dev/null; then
  device=$(nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1 | tr ' ' '-')
  results=docs/benchmarks/$device-$(date -u +%F)
else
  echo "gpu.sh: no nvidia-smi, so no GPU to measure; --small shows that everything runs without one" >&2
  exit 2
fi
mkdir -p "$(dirname "$results")"
echo "gpu.sh: results in $results*"
"$python" -m run_scripts.bench.first --out "$results-first.json" || true # gpu.py reads the verdicts
exec "$python" -m run_scripts.bench.gpu --out "$results.json" --after "$results-first.json" "$@"
