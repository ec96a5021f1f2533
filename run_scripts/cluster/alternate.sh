#!/usr/bin/env bash
# One of several runs that take turns on a machine: while one generates, another learns, so neither half is idle.
#
#   GENERATE_GPUS=0,1 LEARN_GPUS=2,3 run_scripts/cluster/alternate.sh a.toml &
#   GENERATE_GPUS=0,1 LEARN_GPUS=2,3 run_scripts/cluster/alternate.sh b.toml &
#
# Arguments after the recipe go to every command (--set ...). TURNS: the folder of the two locks (/tmp/mugrpo-turns).
# SERVERS="http://a:8000 http://b:8000": servers of this run alone generate, and no GPU of this machine does.
# A run that is killed goes on where it was with the same command.
set -euo pipefail
[ $# -ge 1 ] || { sed -n '2,10s/^# \{0,1\}//p' "$0" >&2; exit 2; }
here=$(dirname "$0")
turns=${TURNS:-/tmp/mugrpo-turns}
mkdir -p "$turns"
mugrpo=("${MUGRPO:-$here/mugrpo.sh}")
how=(--engine-only)
if [ -n "${SERVERS:-}" ]; then
  how=()
  for url in $SERVERS; do how+=(--server "$url"); done
fi
run_dir=$("${mugrpo[@]}" train "$@" --dry-run=full 2> /dev/null | sed -n '/^\[run\]/,/^\[/s/^dir = "\(.*\)"/\1/p')
[ -n "$run_dir" ] || { "${mugrpo[@]}" train "$@" --dry-run > /dev/null; exit 2; }
said=$(mktemp)
trap 'rm -f "$said"' EXIT

generate() { CUDA_VISIBLE_DEVICES=${GENERATE_GPUS-} "${mugrpo[@]}" generate "$@" "${how[@]}"; }
learn() { CUDA_VISIBLE_DEVICES=${LEARN_GPUS-} "${mugrpo[@]}" optimize "$@"; }
turn() {  # turn NAME COMMAND...: wait for the others' turn to end; say when this one begins and ends
  local lock=$1
  shift
  exec 8> "$turns/$lock"
  flock 8
  echo "alternate.sh: $(date +%s.%N) $run_dir $lock begins"
  local code=0
  "$@" || code=$?
  echo "alternate.sh: $(date +%s.%N) $run_dir $lock ends"
  exec 8>&-
  return $code
}

[ -n "${GENERATE_GPUS:-}" ] || unset GENERATE_GPUS
while true; do
  if ! turn generate generate "$@" 2> "$said"; then
    if grep -q "has taken all of its" "$said"; then break; fi
    cat "$said" >&2
    exit 1
  fi
  "${mugrpo[@]}" seal "$run_dir"
  turn learn learn "$@"
done
"${mugrpo[@]}" train "$@"
