#!/usr/bin/env bash
# The first half hour on a GPU machine without a network (docs/performance.md), in four calls of at most ten minutes each:
#
#   run_scripts/bench/gpu_steps.sh 1|2|3|4      # in the checkout's root; results go to the folder $OUT
set -o pipefail
source run_scripts/bench/carried.sh
case $1 in
1) # Ten probes with a verdict each: kernels, NCCL, CUDA IPC, memory saver, learner, engine, a whole run.
  which nvcc ninja c++
  timeout 598 python3 -m run_scripts.bench.first --out "$OUT/first.json"
  ;;
2) # Sync by CUDA IPC, sleep and wake, engine against bare SGLang.
  timeout 560 python3 -m run_scripts.bench.gpu --out "$OUT/two.json" --seconds 540 --parts ceilings switch engine_bare engine_ours 2>&1 | tee "$OUT/two.log"
  tar czf "$OUT/two-logs.tar.gz" -C "$OUT" two-logs && rm -r "$OUT/two-logs"
  ;;
3) # Loss path against its floor and Liger, MFU, where an update's time goes.
  timeout 410 python3 -m run_scripts.bench.gpu --out "$OUT/three.json" --seconds 390 --parts ceilings loss learner 2>&1 | tee "$OUT/three.log"
  timeout 120 python3 -m run_scripts.bench.profile_update --out "$OUT/update.json.gz" 2>&1 | tee "$OUT/update.log"
  ;;
4) # A whole run with both schedules, and the kernels: which chunk, one chunk in ncu, the race test.
  timeout 420 python3 -m run_scripts.bench.gpu --out "$OUT/four.json" --seconds 400 --parts whole 2>&1 | tee "$OUT/four.log"
  for chunk in 2048 4096 8192; do
    timeout 30 python3 -m run_scripts.bench.loss_path --device cuda --chunk "$chunk" --ways floor fused
  done 2>&1 | tee "$OUT/chunks.log"
  timeout 40 ncu --target-processes all --clock-control none -k 'regex:_statistics|_gradient' -c 4 \
    python3 -m run_scripts.bench.loss_path --device cuda --ways fused --repeats 1 2>&1 | tee "$OUT/ncu.log"
  timeout 40 compute-sanitizer --tool racecheck python3 -m pytest -q -m gpu tests/kernels/test_cuda.py -k race 2>&1 | tee "$OUT/race.log"
  ;;
*)
  echo "gpu_steps.sh: $1 is not a step; it takes 1, 2, 3 or 4" >&2
  exit 2
  ;;
esac
