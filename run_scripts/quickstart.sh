#!/usr/bin/env bash
# From a fresh clone to a trained model: makes .venv, then trains the small model that comes with the package with
# mu-GRPO, on generated arithmetic problems. Arguments go to `mugrpo train`, for instance:
#
#   run_scripts/quickstart.sh --set run.seed=1 --set run.dir=runs/quickstart-1
set -euo pipefail
cd "$(dirname "$0")/.."
run_scripts/setup.sh
precision=()
# The recipe's float32 is for CPUs: on CUDA, flash attention and many of SGLang's kernels need half precision.
if grep -q '^cuda' .venv/.ready; then precision=(--set model.dtype=bfloat16); fi
echo "quickstart: the start is shipped: a model of 1.4 MB that imitated answers until it got 48 % of the problems right." \
  "What follows trains it with mu-GRPO, here. To make the start too: .venv/bin/mugrpo sft run_scripts/recipes/quickstart.toml"
.venv/bin/mugrpo train run_scripts/recipes/quickstart.toml "${precision[@]}" "$@"
