#!/usr/bin/env bash
# Makes .venv with pinned versions; returns at once if it is up to date. .venv is a link into .venvs/: runs that were
# started with the former environment keep it, and .venv never names a half-made one.
#
#   run_scripts/setup.sh [--cpu | --cuda] [--with-te] [--with-apex]
#
# Without --cpu or --cuda: cuda if nvidia-smi finds a GPU, else cpu. Two optional accelerators are built from source against
# the installed torch, which needs nvcc of torch's CUDA version and takes half an hour each:
#   --with-te     NVIDIA Transformer Engine: fused layers (learner.layers), fused Adam
#   --with-apex   NVIDIA apex: fused Adam and gradient scaling, without Transformer Engine
# --cuda, --with-te and --with-apex have not been tried on a CUDA machine yet.
set -euo pipefail
cd "$(dirname "$0")/.."

TE_VERSION=2.11.0     # from the registry: the core as a wheel, the torch extension as source
APEX_TAG=25.09        # of https://github.com/NVIDIA/apex; the registry's "apex" is a different project

device=cpu with_te='' with_apex=''
if command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; then device=cuda; fi
for option in "$@"; do
  case "$option" in
    --cpu) device=cpu ;;
    --cuda) device=cuda ;;
    --with-te) with_te=yes ;;
    --with-apex) with_apex=yes ;;
    *) echo "setup.sh: unknown option $option; it takes --cpu, --cuda, --with-te, --with-apex" >&2; exit 2 ;;
  esac
done
if [ -n "$with_te$with_apex" ] && [ "$device" = cpu ]; then
  echo "setup.sh: Transformer Engine and apex are for CUDA machines; add --cuda, or remove --with-te and --with-apex" >&2
  exit 2
fi

pins=$(cat pyproject.toml run_scripts/setup.sh run_scripts/constraints-*.txt | sha256sum | cut -c1-12)
stamp="$device${with_te:+ te}${with_apex:+ apex} $pins"
here=$(pwd -P)
# An environment names its own place: one that was copied or moved with its checkout would run the other checkout's code.
is_ready() { [ "$(cat "$1/.ready" 2>/dev/null)" = "$stamp
$here" ]; }
if is_ready .venv; then exit 0; fi
made_for=$(sed -n 2p .venv/.ready 2>/dev/null || true)
if [ -n "$made_for" ] && [ "$made_for" != "$here" ]; then
  echo "setup: .venv was made for $made_for, and this checkout is $here: installing again"
fi

python=
for candidate in python3.11 python3.12 python3; do
  if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; then
    python=$candidate
    break
  fi
done
if [ -z "$python" ]; then
  echo "setup.sh: needs Python 3.11 or 3.12 on the PATH (megatron-core and SGLang have wheels for these)" >&2
  exit 2
fi

# Driver, C library and compilers, before anything is downloaded. What only an engine's start needs is just named.
if [ "$device" = cuda ]; then "$python" -m mugrpo_megatron.observe.toolchain || exit 2; fi

mkdir -p .venvs
exec 9> .venvs/.lock
if ! flock --nonblock 9; then
  echo "setup: another setup.sh is at work in this checkout; waiting for it"
  flock 9
  if is_ready .venv; then exit 0; fi
fi

# The path is that of the link's target: a process that was started from it finds its packages after the link has moved.
venv=$PWD/.venvs/${stamp// /-}
former=$(readlink -f .venv || true)
use() {
  if [ -d .venv ] && [ ! -L .venv ]; then mv .venv .venvs/replaced; fi  # made by an older setup.sh
  ln -sfn "${venv#"$PWD/"}" .venvs/link
  mv -T .venvs/link .venv
}
if is_ready "$venv"; then use; exit 0; fi

echo "setup: installing for $device into .venv with $("$python" --version) (about a minute from a warm pip cache)"
rm -rf "$venv"  # of a set-up that was interrupted
"$python" -m venv "$venv"
install() { "$venv/bin/pip" install --quiet --disable-pip-version-check --no-warn-conflicts "$@"; }

if [ "$device" = cpu ]; then
  install --constraint run_scripts/constraints-cpu.txt --editable ".[cpu,dev,study]"
  # SGLang's own requirements are for CUDA machines; what it needs on CPU is the cpu extra.
  install --no-deps sglang==0.5.15.post1 torchvision==0.28.0
  # The registry has only CUDA builds of torchvision. Next to a CPU torch their library does not load, and the import
  # fails where it registers fakes of the library's operators. SGLang only imports torchvision, so the fakes are removed.
  # No pin avoids this: the newest build, 0.29.2, fails in the same place.
  if ! "$venv"/bin/python -c 'import torchvision' 2>/dev/null; then
    sed -i '/^@torch.library.register_fake/d' "$venv"/lib/python3*/site-packages/torchvision/_meta_registrations.py
    "$venv"/bin/python -c 'import torchvision'
  fi
else
  install --constraint run_scripts/constraints-cuda.txt --editable ".[cuda,dev,study]"
fi

# Compile against the torch in .venv: pip's isolated build environment would install another one.
check_compiler() {
  local built found
  built=$("$venv"/bin/python -c 'import torch; print(torch.version.cuda or "")')
  if [ -z "$built" ]; then
    echo "setup.sh: the torch in .venv is built for CPU, so $1 cannot be compiled against it" >&2
    exit 2
  fi
  found=$(nvcc --version 2>/dev/null | sed -n 's/.*release \([0-9]*\.[0-9]*\).*/\1/p')
  if [ "$found" != "$built" ]; then
    echo "setup.sh: $1 needs nvcc of CUDA $built, torch's, but ${found:-none} is on the PATH; install that toolkit" \
      "or point PATH and CUDA_HOME at it" >&2
    exit 2
  fi
  install ninja packaging wheel setuptools pybind11
}

if [ -n "$with_te" ]; then
  check_compiler "Transformer Engine"
  echo "setup: building Transformer Engine $TE_VERSION"
  # pip's cudnn.h lies where no compiler looks; the toolkit need not have one.
  cudnn=$(find "$venv"/lib/python3*/site-packages/nvidia -name cudnn.h -printf '%h:' -quit || true)
  CPATH=$cudnn${CPATH:-} NVTE_FRAMEWORK=pytorch install --constraint run_scripts/constraints-cuda.txt \
    --no-build-isolation "transformer-engine[pytorch,core_cu13]==$TE_VERSION"
  "$venv"/bin/python -c 'import transformer_engine.pytorch' || {
    echo "setup.sh: Transformer Engine was built but cannot be imported; $venv/bin/mugrpo doctor says why" >&2
    exit 2
  }
fi

if [ -n "$with_apex" ]; then
  check_compiler apex
  # The registry's package of this name is unrelated: remove it if it is installed.
  "$venv"/bin/pip uninstall --quiet --yes apex 2>/dev/null || true
  echo "setup: building NVIDIA apex $APEX_TAG"
  APEX_CPP_EXT=1 APEX_CUDA_EXT=1 install --no-build-isolation --no-deps "git+https://github.com/NVIDIA/apex@$APEX_TAG"
  "$venv"/bin/python -c 'import torch, amp_C; from apex.multi_tensor_apply import multi_tensor_applier' || {
    echo "setup.sh: apex was built without its CUDA extensions; the compiler's output above says why" >&2
    exit 2
  }
fi

printf '%s\n' "$stamp" "$here" > "$venv/.ready"
use
# The former environment stays, as runs on other machines may use it, and older ones that a process here uses.
for other in .venvs/*/; do
  other=$PWD/${other%/}
  if [ "$other" = "$venv" ] || [ "$other" = "$former" ] || grep -qsF "$other/" /proc/[0-9]*/maps; then continue; fi
  rm -rf "$other"
done
echo "setup: ready; run_scripts/quickstart.sh trains a small model, .venv/bin/mugrpo doctor reports what was found"
