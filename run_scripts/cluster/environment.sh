# shellcheck shell=bash
# Sourced by torchrun.sh and mugrpo.sh: finds the Python that has mugrpo_megatron.

# find_python ROOT: prints the first of these that can import the package; nothing if none can.
#   1. .venv of the checkout ROOT, which run_scripts/setup.sh makes
#   2. the activated virtual environment
#   3. the activated conda environment
#   4. python3, then python on the PATH: a container's, or the one that a wheel was installed for
find_python() {
  local python
  # The link's target: setup.sh may move the link while this runs.
  for python in "$(readlink -f "$1/.venv" || true)/bin/python" "${VIRTUAL_ENV:+$VIRTUAL_ENV/bin/python}" \
    "${CONDA_PREFIX:+$CONDA_PREFIX/bin/python}" "$(command -v python3 || true)" "$(command -v python || true)"; do
    # -P: a folder mugrpo_megatron of the current directory is not the package.
    if [ -x "$python" ] && "$python" -P -c '
import importlib.util, sys
sys.exit(importlib.util.find_spec("mugrpo_megatron") is None)' 2>/dev/null; then
      printf '%s\n' "$python"
      return
    fi
  done
}

# need_python NAME ROOT: sets `python`, or ends the script NAME with a sentence.
need_python() {
  python=$(find_python "$2")
  [ -n "$python" ] && return
  echo "$1: no Python here has mugrpo_megatron: not .venv, not an activated environment, not the PATH's;" \
    "run run_scripts/setup.sh, or activate the environment that has it" >&2
  exit 2
}
