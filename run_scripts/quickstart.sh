#!/usr/bin/env bash
# From a fresh clone to a trained model: makes .venv, trains a small warm start on bundled arithmetic problems, then
# trains it with mu-GRPO. Arguments go to `mugrpo train`, for instance:
#
#   run_scripts/quickstart.sh --set run.seed=1 --set run.dir=runs/quickstart-1
set -euo pipefail
cd "$(dirname "$0")/.."
run_scripts/setup.sh
precision=()
# The recipe's float32 is for CPUs: on CUDA, flash attention and many of SGLang's kernels need half precision.
if grep -q '^cuda' .venv/.ready; then precision=(--set model.dtype=bfloat16); fi
.venv/bin/mugrpo sft run_scripts/recipes/quickstart.toml "${precision[@]}"
.venv/bin/mugrpo train run_scripts/recipes/quickstart.toml "${precision[@]}" "$@"
