#!/usr/bin/env bash
# Takes a folder that is larger than what one call may carry to a GPU machine, in parts, over calls that follow at once.
#
#   run_scripts/dev/bench/parts.sh split FOLDER    # here: .gpu/parts/1, 2, ... of at most 56 MiB, and .gpu/parts/sums
#   run_scripts/dev/bench/parts.sh take            # there, in a call that carries .gpu/parts/N and .gpu/parts/sums: keeps it
#   run_scripts/dev/bench/parts.sh join            # there, after the last: checks every part and unpacks FOLDER
#
# ~/parts lasts as long as the machine does. PART_BYTES is the largest part.
set -euo pipefail
kept=$HOME/parts
case "${1:-}" in
  split)
    rm -rf .gpu/parts
    mkdir -p .gpu/parts
    tar cf - "${2:?parts.sh split needs a folder}" | split -b "${PART_BYTES:-58720256}" -a 1 --numeric-suffixes=1 - .gpu/parts/
    (cd .gpu/parts && sha256sum [0-9] > sums)
    echo "parts: $(wc -l < .gpu/parts/sums) of $2"
    ;;
  take)
    mkdir -p "$kept"
    cp .gpu/parts/* "$kept/"
    echo "parts: $(cd "$kept" && ls | grep -vc sums) of $(wc -l < "$kept/sums") are there"
    ;;
  join)
    (cd "$kept" && sha256sum --quiet --check sums) || { echo "parts: take the parts above again" >&2; exit 1; }
    cat "$kept"/[0-9] | tar xf -
    rm -rf "$kept"
    ;;
  *) echo "parts.sh: split FOLDER, take or join" >&2; exit 2 ;;
esac
