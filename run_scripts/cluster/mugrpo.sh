#!/usr/bin/env bash
# The mugrpo command in one process, in the environment that torchrun.sh finds:
#
#   run_scripts/cluster/mugrpo.sh COMMAND [ARGUMENTS]
set -euo pipefail
here=$(dirname "$0")
# shellcheck source=run_scripts/cluster/environment.sh
source "$here/environment.sh"
need_python mugrpo.sh "$here/../.."
exec "$python" -P -u -m mugrpo_megatron "$@"
