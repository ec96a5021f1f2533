#!/usr/bin/env bash
# Serves a run's current weights with vLLM or SGLang, and again when they have changed: one of the servers that
# `mugrpo train --server` and `mugrpo generate --server` ask (docs/servers.md). The machine needs that engine, bash and
# python3, not this package; copy this one file.
#
#   serve.sh vllm RUN_DIR/hf 8000 [--first MODEL NAME] [ARGUMENTS OF THE ENGINE]
#   serve.sh sglang RUN_DIR/hf 8000 --first models/qwen 3f5a045a40a985c3-0 --dtype bfloat16 --tp 2
#
# --first MODEL NAME: what to serve while there is no RUN_DIR/hf yet: the recipe's model.path, under the name that the
# command prints. RUN_DIR/hf may be a copy: its mugrpo.json, which has to come last, names run and update.
# Only this machine reaches the server: use a tunnel (ssh -L), or --host 0.0.0.0 on a network that is closed to others.
# PYTHON: the interpreter of the engine (python3).
set -euo pipefail
usage() { sed -n '2,10s/^# \{0,1\}//p' "$0" >&2; exit 2; }
[ $# -ge 3 ] || usage
engine=$1 weights=$2 port=$3
shift 3
first='' first_name=''
if [ "${1:-}" = --first ]; then
  [ $# -ge 3 ] || usage
  first=$2 first_name=$3
  shift 3
fi
python=${PYTHON:-python3}
case $engine in
  vllm) command=("$python" -m vllm.entrypoints.openai.api_server --logprobs-mode processed_logprobs --model) ;;
  sglang) command=("$python" -m sglang.launch_server --model-path) ;;
  *) usage ;;
esac

# current: prints the name of the weights in $weights, RUN-UPDATES; nothing while they are missing or half copied.
current() {
  python3 - "$weights/mugrpo.json" 2> /dev/null << 'PYTHON' || true
import json, sys
content = json.load(open(sys.argv[1]))
print(f"{content['run']}-{content['cursor']['updates']}")
PYTHON
}

server=''
stop() {
  [ -n "$server" ] || return 0
  kill -TERM -- "-$server" 2> /dev/null || true
  for _ in $(seq 60); do
    kill -0 -- "-$server" 2> /dev/null || break
    sleep 1
  done
  kill -KILL -- "-$server" 2> /dev/null || true
  wait "$server" 2> /dev/null || true
  server=''
}
trap 'stop; exit 0' TERM INT HUP
trap stop EXIT
set -m  # the server and its workers are a process group of their own

served=''
while true; do
  name=$(current) path=$weights
  if [ -z "$name" ]; then name=$first_name path=$first; fi
  if [ -n "$name" ] && [ "$name" != "$served" ]; then
    stop
    echo "serve.sh: $path as $name on port $port"
    "${command[@]}" "$path" --served-model-name "$name" --port "$port" --host 127.0.0.1 "$@" &
    server=$! served=$name
  elif [ -n "$server" ] && ! kill -0 "$server" 2> /dev/null; then
    echo "serve.sh: the server has ended; it is started again" >&2
    server='' served=''
  fi
  sleep "${POLL_S:-5}" & wait $! || true  # a signal ends the wait
done
