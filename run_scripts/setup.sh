#!/usr/bin/env bash
# Makes .venv with pinned versions; returns at once if it is up to date.
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

stamp="$device${with_te:+ te}${with_apex:+ apex} $(cat pyproject.toml run_scripts/setup.sh run_scripts/constraints-*.txt | sha256sum | cut -d' ' -f1)"
if [ "$(cat .venv/.ready 2>/dev/null)" = "$stamp" ]; then exit 0; fi

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

echo "setup: installing for $device into .venv with $("$python" --version) (about a minute from a warm pip cache)"
rm -rf .venv
"$python" -m venv .venv
install() { .venv/bin/pip install --quiet --disable-pip-version-check --no-warn-conflicts "$@"; }

if [ "$device" = cpu ]; then
  install --constraint run_scripts/constraints-cpu.txt --editable ".[cpu,dev,study]"
  # SGLang's own requirements are for CUDA machines; what it needs on CPU is the cpu extra.
  install --no-deps sglang==0.5.15.post1 torchvision==0.28.0
  # The registry has only CUDA builds of torchvision. Next to a CPU torch their library does not load, and the import
  # fails where it registers fakes of the library's operators. SGLang only imports torchvision, so the fakes are removed.
  # No pin avoids this: the newest build, 0.29.2, fails in the same place.
  if ! .venv/bin/python -c 'import torchvision' 2>/dev/null; then
    sed -i '/^@torch.library.register_fake/d' .venv/lib/python3*/site-packages/torchvision/_meta_registrations.py
    .venv/bin/python -c 'import torchvision'
  fi
else
  # The cuda extra without Transformer Engine, which is compiled: --with-te does that against the torch installed here.
  install --constraint run_scripts/constraints-cuda.txt --editable ".[dev,study]" torch sglang
fi

# Compile against the torch in .venv: pip's isolated build environment would install another one.
check_compiler() {
  local built found
  built=$(.venv/bin/python -c 'import torch; print(torch.version.cuda or "")')
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
  major=$(.venv/bin/python -c 'import torch; print(torch.version.cuda.split(".")[0])')
  NVTE_FRAMEWORK=pytorch install --no-build-isolation "transformer-engine[pytorch,core_cu$major]==$TE_VERSION"
  .venv/bin/python -c 'import transformer_engine.pytorch' || {
    echo "setup.sh: Transformer Engine was built but cannot be imported; .venv/bin/mugrpo doctor says why" >&2
    exit 2
  }
fi

if [ -n "$with_apex" ]; then
  check_compiler apex
  # The registry's package of this name is unrelated: remove it if it is installed.
  .venv/bin/pip uninstall --quiet --yes apex 2>/dev/null || true
  echo "setup: building NVIDIA apex $APEX_TAG"
  APEX_CPP_EXT=1 APEX_CUDA_EXT=1 install --no-build-isolation --no-deps "git+https://github.com/NVIDIA/apex@$APEX_TAG"
  .venv/bin/python -c 'import amp_C; from apex.multi_tensor_apply import multi_tensor_applier' || {
    echo "setup.sh: apex was built without its CUDA extensions; the compiler's output above says why" >&2
    exit 2
  }
fi

echo "$stamp" > .venv/.ready
echo "setup: ready; run_scripts/quickstart.sh trains a small model, .venv/bin/mugrpo doctor reports what was found"
