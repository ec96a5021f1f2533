#!/usr/bin/env bash
# Runs a mugrpo command on several ranks, on one machine or many:
#
#   run_scripts/torchrun.sh RANKS COMMAND [ARGUMENTS]                            RANKS ranks on this machine
#   run_scripts/torchrun.sh --nodes N --node K --master HOST RANKS COMMAND ...   on node K of N, RANKS on each
#
#   --nodes N        number of nodes; run the same command on each of them, each with its own --node (0 to N-1)
#   --node K         number of this node; node 0 is the master
#   --master HOST    address of node 0: HOST or HOST:PORT (29500)
#   --restarts R     restart all ranks up to R times when one fails; the run continues from its newest checkpoint
#   --grace S        seconds that ranks get to save and exit when they are asked to stop (600)
#   --logs DIR       a log for every rank under DIR; only the node's first rank prints to the console then
#   --interface IF   network interface of the ranks' rendezvous and of gloo (and of NCCL, where it uses sockets)
#
# It takes the Python that has mugrpo_megatron: that of .venv beside run_scripts/, of the activated virtual environment, of
# the activated conda environment, or the PATH's (a container's, or one that a wheel was installed for), in this order.
#
# A rank stands for a GPU. All nodes need the run directory under the same path: checkpoints and stages are shared files.
set -euo pipefail

usage() {
  sed -n '2,/^# A rank/{/^# A rank/d;s/^# \{0,1\}//;p;}' "$0" >&2
  exit 2
}

nodes=1 node=0 master='' restarts=0 grace=600 logs='' interface=''
while [[ ${1:-} == --* ]]; do
  [ $# -ge 2 ] || usage
  case $1 in
    --nodes) nodes=$2 ;;
    --node) node=$2 ;;
    --master) master=$2 ;;
    --restarts) restarts=$2 ;;
    --grace) grace=$2 ;;
    --logs) logs=$2 ;;
    --interface) interface=$2 ;;
    *) echo "torchrun.sh: unknown option $1" >&2; usage ;;
  esac
  shift 2
done
[ $# -ge 2 ] || usage
ranks=$1
shift
for number in "$nodes" "$node" "$restarts" "$grace" "$ranks"; do
  [[ $number =~ ^[0-9]+$ ]] || { echo "torchrun.sh: $number is not a number" >&2; usage; }
done

options=(--nproc-per-node "$ranks")
if [ "$nodes" -eq 1 ]; then
  # The ranks' store (launch.py), gloo and NCCL listen on loopback only.
  options+=(--rdzv-backend loopback --rdzv-endpoint 127.0.0.1:0 --rdzv-id mugrpo --max-restarts "$restarts")
  export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-lo} GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo}
else
  [ -n "$master" ] || { echo "torchrun.sh: --nodes $nodes needs --master, the address of node 0" >&2; exit 2; }
  [ "$node" -lt "$nodes" ] || { echo "torchrun.sh: --node counts from 0 to $((nodes - 1))" >&2; exit 2; }
  host=${master%:*} port=29500
  [[ $master == *:* ]] && port=${master##*:}
  options+=(--nnodes "$nodes")
  if [ "$restarts" -eq 0 ]; then
    # Ranks rendezvous at a fixed address. On a disconnected node torchrun waits for nothing and ends with its ranks.
    options+=(--node-rank "$node" --master-addr "$host" --master-port "$port")
  else
    # Only this rendezvous lets the nodes agree on a restart. Nodes are numbered in the order in which they join.
    is_host=$([ "$node" -eq 0 ] && echo true || echo false)
    options+=(--max-restarts "$restarts" --rdzv-backend c10d --rdzv-endpoint "$host:$port" --rdzv-id mugrpo)
    options+=(--rdzv-conf "is_host=$is_host,join_timeout=900")
  fi
fi
if [ -n "$logs" ]; then
  options+=(--log-dir "$logs" --redirects 3 --tee 0:3)
fi

# NCCL finds NVLink, InfiniBand and RoCE by itself. You may need these variables:
#   NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME   the interface for bootstrap and for gloo, if a machine has several: other
#                                            nodes may not reach the default one (--interface sets both)
#   NCCL_IB_HCA                              which InfiniBand adapters to use, e.g. mlx5; unset uses all that are up
#   NCCL_DEBUG=INFO                          prints the transports in use: look for NET/IB and P2P, not Socket
#   PYTORCH_ALLOC_CONF, PYTORCH_CUDA_ALLOC_CONF    leave expandable_segments off: the learner shares memory with the engine
#                                            by handle, and the engine's memory saver does not work with it
# How long a collective may take is run.collective_timeout_s of the recipe, not an environment variable.
if [ -n "$interface" ]; then
  export NCCL_SOCKET_IFNAME=$interface GLOO_SOCKET_IFNAME=$interface
fi
# With one hardware queue, Megatron overlaps tensor parallel communication with computation in the right order.
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}

# What torchrun sets, with a warning.
if [ "$ranks" -gt 1 ]; then export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}; fi
# torch.compile would start 32 compilers for each rank of a node.
export TORCHINDUCTOR_COMPILE_THREADS=${TORCHINDUCTOR_COMPILE_THREADS:-4}

scripts=$(dirname "$0")
# shellcheck source=run_scripts/cluster/environment.sh
source "$scripts/cluster/environment.sh"
need_python torchrun.sh "$scripts/.."
# -P: a random.py in the current directory is not imported in place of Python's.
exec "$python" -P "$scripts/cluster/launch.py" "$grace" "${options[@]}" --no-python "$python" -P -u -m mugrpo_megatron "$@"
