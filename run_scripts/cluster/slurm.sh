# shellcheck shell=bash
# Sourced by the batch scripts of run_scripts/ with their arguments: takes the options that they share, leaves the rest in
# `arguments`, and offers step, which runs a command on every node, and next_job. They set `name` and `usage` before.
# shellcheck disable=SC2034,SC2154  # what they read, and what they set

again=20 ranks=${SLURM_GPUS_ON_NODE:-} interface='' pyxis='' apptainer='' mounts=''
while [[ ${1:-} == --* ]]; do
  [ $# -ge 2 ] || usage
  case $1 in
    --again) again=$2 ;;
    --ranks) ranks=$2 ;;
    --interface) interface=$2 ;;
    --pyxis) pyxis=$2 ;;
    --apptainer) apptainer=$2 ;;
    --mounts) mounts=$2 ;;
    *) echo "$name: unknown option $1" >&2; usage ;;
  esac
  shift 2
done
arguments=("$@")
[[ $again =~ ^[0-9]+$ ]] || { echo "$name: --again $again is not a number" >&2; exit 2; }
if [ -n "$pyxis" ] && [ -n "$apptainer" ]; then
  echo "$name: --pyxis and --apptainer exclude each other" >&2
  exit 2
fi

# The folder of the scripts that the nodes run: an image of run_scripts/container has its own.
scripts=$PWD/run_scripts
if [ -n "$pyxis$apptainer" ]; then scripts=/mugrpo/run_scripts; fi
logs=logs/$SLURM_JOB_ID
note=$PWD/$logs/stopped
mkdir -p "$logs"
rm -f "$note"

# The fewest cores that the job has on one of its nodes: Slurm writes 96(x3),64.
cores=$(tr ',' '\n' <<< "$SLURM_JOB_CPUS_PER_NODE" | sed 's/(.*//' | sort -n | sed -n 1p)

# step COMMAND [ARGUMENTS]: one task on each node. Notes in $note whether SIGTERM came.
step() {
  local seen=$PWD:$PWD${mounts:+,$mounts} options inside=()
  # Since Slurm 22.05 srun does not take --cpus-per-task from the job; without it, a node's ranks share one core.
  # --kill-on-bad-exit ends all nodes when one fails; otherwise the others would wait for their timeouts.
  # --wait: nodes may finish saving this many seconds after the first of them.
  options=(--ntasks-per-node=1 --cpus-per-task="$cores" --kill-on-bad-exit=1 --wait=660)
  if [ -n "$pyxis" ]; then
    options+=(--container-image="$pyxis" --container-mounts="$seen" --container-workdir="$PWD")
  elif [ -n "$apptainer" ]; then
    inside=(apptainer exec --nv --bind "$seen" --pwd "$PWD" "$apptainer")
  fi
  srun "${options[@]}" "$PWD/run_scripts/cluster/noted.sh" "$note" "${inside[@]}" "$@"
}

# next_job: queue this job again if SIGTERM stopped the step before its end. Only called after a step that ended with 0:
# a user's mistake and a failure end the job, and whoever cancels a job ends this script too. The bound is on all restarts
# of the job, those after a failed node included.
next_job() {
  if [ ! -e "$note" ]; then return; fi
  if [ "${SLURM_RESTART_COUNT:-0}" -ge "$again" ]; then
    echo "$name: stopped before its end, and restarted $again times (--again); submit the same command to continue" >&2
    exit 1
  fi
  echo "$name: stopped before its end; queueing job $SLURM_JOB_ID again"
  if ! scontrol requeue "$SLURM_JOB_ID"; then
    echo "$name: Slurm does not queue this job again; submit the same command to continue" >&2
    exit 1
  fi
}
