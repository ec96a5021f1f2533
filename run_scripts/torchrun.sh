#!/usr/bin/env bash
# Any mugrpo command on several ranks, of this machine or of many:
#
#   run_scripts/torchrun.sh RANKS COMMAND [ARGUMENTS]                            RANKS ranks on this machine
#   run_scripts/torchrun.sh --nodes N --node K --master HOST RANKS COMMAND ...   on node K of N, RANKS on each
#
#   --nodes N        machines; the same command runs on each of them, with a --node of its own (0 to N-1)
#   --node K         which of them this is; node 0 is the master
#   --master HOST    node 0, as the others reach it: HOST or HOST:PORT (29500)
#   --restarts R     start all ranks anew up to R times when one ends badly; the run goes on from its newest checkpoint
#   --logs DIR       a log for every rank under DIR; only the node's first rank speaks on the console then
#   --interface IF   network interface of the ranks' rendezvous and of gloo (and of NCCL, where it uses sockets)
#
# A rank stands for a GPU. All nodes see the run directory under one path: checkpoints and stages are shared files.
set -euo pipefail

usage() {
  sed -n '2,/^# A rank/{/^# A rank/d;s/^# \{0,1\}//;p;}' "$0" >&2
  exit 2
}

nodes=1 node=0 master='' restarts=0 logs='' interface=''
while [[ ${1:-} == --* ]]; do
  [ $# -ge 2 ] || usage
  case $1 in
    --nodes) nodes=$2 ;;
    --node) node=$2 ;;
    --master) master=$2 ;;
    --restarts) restarts=$2 ;;
    --logs) logs=$2 ;;
    --interface) interface=$2 ;;
    *) echo "torchrun.sh: unknown option $1" >&2; usage ;;
  esac
  shift 2
done
[ $# -ge 2 ] || usage
ranks=$1
shift
for number in "$nodes" "$node" "$restarts" "$ranks"; do
  [[ $number =~ ^[0-9]+$ ]] || { echo "torchrun.sh: $number is not a number" >&2; usage; }
done

options=(--nproc-per-node "$ranks")
if [ "$nodes" -eq 1 ]; then
  options+=(--standalone --max-restarts "$restarts")
else
  [ -n "$master" ] || { echo "torchrun.sh: --nodes $nodes needs --master, the address of node 0" >&2; exit 2; }
  [ "$node" -lt "$nodes" ] || { echo "torchrun.sh: --node counts from 0 to $((nodes - 1))" >&2; exit 2; }
  host=${master%:*} port=29500
  [[ $master == *:* ]] && port=${master##*:}
  options+=(--nnodes "$nodes")
  if [ "$restarts" -eq 0 ]; then
    # Ranks meet at a fixed address. A node that is cut off waits for nothing here and leaves when its ranks do.
    options+=(--node-rank "$node" --master-addr "$host" --master-port "$port")
  else
    # Restarting needs the nodes to agree that they do, which only this rendezvous knows how to. Nodes are numbered as
    # they arrive.
    is_host=$([ "$node" -eq 0 ] && echo true || echo false)
    options+=(--max-restarts "$restarts" --rdzv-backend c10d --rdzv-endpoint "$host:$port" --rdzv-id mugrpo)
    options+=(--rdzv-conf "is_host=$is_host,join_timeout=900")
  fi
fi
if [ -n "$logs" ]; then
  options+=(--log-dir "$logs" --redirects 3 --tee 0:3)
fi

# NCCL finds NVLink, InfiniBand and RoCE by itself; what follows is what it cannot know, and what you may need to know.
#   NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME   the interface for bootstrap and for gloo, where a machine has several: the
#                                            default may be one that the other nodes cannot reach (--interface sets both)
#   NCCL_IB_HCA                              which InfiniBand adapters to use, e.g. mlx5; unset takes all that are up
#   NCCL_DEBUG=INFO                          prints the transports that were chosen: look for NET/IB and P2P, not Socket
#   PYTORCH_CUDA_ALLOC_CONF                  leave expandable_segments off: the learner hands memory to the engine by
#                                            handle, and the engine's memory saver does not work with it
# How long a collective may take is run.collective_timeout_s of the recipe, not an environment variable.
if [ -n "$interface" ]; then
  export NCCL_SOCKET_IFNAME=$interface GLOO_SOCKET_IFNAME=$interface
fi
# Asked to stop (SIGTERM), ranks finish what they do and save; torchrun would kill them after 30 seconds.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}
# Megatron overlaps tensor parallel communication with computation in the order of one hardware queue.
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}

exec "$(dirname "$0")/../.venv/bin/torchrun" "${options[@]}" -m mugrpo_megatron "$@"
