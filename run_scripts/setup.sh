#!/usr/bin/env bash
# Makes .venv with pinned versions; returns at once if it is up to date. .venv is a link into .venvs/: runs that were
# started with the former environment keep it, and .venv never names a half-made one.
#
#   run_scripts/setup.sh [--cpu | --cuda] [--stack pinned|new] [--with-te] [--with-apex]
#
# --stack new makes .venv-new beside it: Python 3.12, megatron-core 0.19, SGLang 0.5.23. The pinned stack is the default.
# Without --cpu or --cuda: cuda if nvidia-smi finds a GPU, else cpu. Two optional accelerators are built from source against
# the installed torch, which needs nvcc of torch's CUDA version and takes half an hour each:
#   --with-te     NVIDIA Transformer Engine: fused layers (learner.layers), fused Adam
#   --with-apex   NVIDIA apex: fused Adam and gradient scaling, without Transformer Engine
# --cuda, --with-te and --with-apex have not been tried on a CUDA machine yet.
set -euo pipefail
cd "$(dirname "$0")/.."

TE_VERSION=2.11.0     # from the registry: the core as a wheel, the torch extension as source
APEX_TAG=25.09        # of https://github.com/NVIDIA/apex; the registry's "apex" is a different project

device=cpu stack=pinned with_te='' with_apex=''
if command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; then device=cuda; fi
while [ $# -gt 0 ]; do
  case "$1" in
    --cpu) device=cpu ;;
    --cuda) device=cuda ;;
    --stack) stack=${2:-}; shift ;;
    --with-te) with_te=yes ;;
    --with-apex) with_apex=yes ;;
    *) echo "setup.sh: unknown option $1; it takes --cpu, --cuda, --stack, --with-te, --with-apex" >&2; exit 2 ;;
  esac
  shift $(($# > 0))
done
case "$stack" in
  pinned) link=.venv suffix='' pythons="python3.11 python3.12 python3" oldest=11 ;;
  new) link=.venv-new suffix=-new pythons="python3.12 python3" oldest=12 ;;
  *) echo "setup.sh: --stack takes pinned or new" >&2; exit 2 ;;
esac
if [ "$stack" = new ] && [ -n "$with_te$with_apex" ]; then
  echo "setup.sh: Transformer Engine and apex were not tried with --stack new; leave them out" >&2
  exit 2
fi
if [ -n "$with_te$with_apex" ] && [ "$device" = cpu ]; then
  echo "setup.sh: Transformer Engine and apex are for CUDA machines; add --cuda, or remove --with-te and --with-apex" >&2
  exit 2
fi

pins=$(cat pyproject.toml run_scripts/setup.sh run_scripts/constraints-*.txt | sha256sum | cut -c1-12)
stamp="$device$suffix${with_te:+ te}${with_apex:+ apex} $pins"
here=$(pwd -P)
# An environment names its own place: one that was copied or moved with its checkout would run the other checkout's code.
is_ready() { [ "$(cat "$1/.ready" 2>/dev/null)" = "$stamp
$here" ]; }
if is_ready $link; then exit 0; fi
made_for=$(sed -n 2p $link/.ready 2>/dev/null || true)
if [ -n "$made_for" ] && [ "$made_for" != "$here" ]; then
  echo "setup: $link was made for $made_for, and this checkout is $here: installing again"
fi

python=
for candidate in $pythons; do
  if "$candidate" -c "import sys; sys.exit(not (3, $oldest) <= sys.version_info[:2] <= (3, 12))" 2>/dev/null; then
    python=$candidate
    break
  fi
done
if [ -z "$python" ]; then
  echo "setup.sh: needs ${pythons% python3} on the PATH (megatron-core and SGLang have wheels for these)" >&2
  exit 2
fi

# Driver, C library and compilers, before anything is downloaded. What only an engine's start needs is just named.
if [ "$device" = cuda ]; then "$python" -m mugrpo_megatron.checks.toolchain || exit 2; fi

mkdir -p .venvs
exec 9> .venvs/.lock
if ! flock --nonblock 9; then
  echo "setup: another setup.sh is at work in this checkout; waiting for it"
  flock 9
  if is_ready $link; then exit 0; fi
fi

# The path is that of the link's target: a process that was started from it finds its packages after the link has moved.
venv=$PWD/.venvs/${stamp// /-}
former=$(readlink -f $link || true)
use() {
  if [ -d $link ] && [ ! -L $link ]; then mv $link .venvs/replaced; fi  # made by an older setup.sh
  ln -sfn "${venv#"$PWD/"}" .venvs/link
  mv -T .venvs/link $link
}
if is_ready "$venv"; then use; exit 0; fi

echo "setup: installing the $stack stack for $device into $link with $("$python" --version) (about a minute from a warm pip cache)"
rm -rf "$venv"  # of a set-up that was interrupted
"$python" -m venv "$venv"
install() { "$venv/bin/pip" install --quiet --disable-pip-version-check --no-warn-conflicts "$@"; }

if [ "$device" = cpu ]; then
  install --constraint run_scripts/constraints-cpu$suffix.txt --editable ".[cpu$suffix,dev,docs,study]"
  "$venv"/bin/python -m mugrpo_megatron.extras.doctor.fix  # SGLang, whose own requirements are for CUDA machines
else
  install --constraint run_scripts/constraints-cuda$suffix.txt --editable ".[cuda$suffix,dev,study]"
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
  case "$other" in "$venv" | "$former" | "$(readlink -f .venv)" | "$(readlink -f .venv-new)") continue ;; esac
  if grep -qsF "$other/" /proc/[0-9]*/maps; then continue; fi
  rm -rf "$other"
done
echo "setup: ready; run_scripts/quickstart.sh trains a small model, $link/bin/mugrpo doctor reports what was found"
