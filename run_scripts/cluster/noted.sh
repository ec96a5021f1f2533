#!/usr/bin/env bash
# Runs a command, passes SIGTERM on to it, and ends with its exit code, or with 0 where SIGTERM itself has ended it: it was
# still starting, since a run hears of the signal.
#
#   run_scripts/cluster/noted.sh NOTE COMMAND [ARGUMENTS]
#
# The file NOTE exists afterwards if SIGTERM came. A run that was stopped ends with exit code 0, as a finished one does;
# the note tells a job script that it was stopped.
set -uo pipefail
note=$1 child='' asked='' stopped=''
shift
# shellcheck disable=SC2329  # the trap calls it
pass_on() {
  asked=yes stopped=yes
  : >> "$note"
  if [ -n "$child" ]; then kill -TERM "$child"; fi
}
trap pass_on TERM
"$@" &
child=$!
if [ -n "$asked" ]; then kill -TERM "$child"; fi
# A signal ends `wait`, but not the command: wait again, until no signal came meanwhile.
while asked='' && { wait "$child"; code=$?; } && [ -n "$asked" ]; do :; done
if [ -n "$stopped" ] && [ "$code" -eq 143 ]; then code=0; fi
exit "$code"
