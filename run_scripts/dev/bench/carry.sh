#!/usr/bin/env bash
# Makes .gpu/ (ignored by git): what a GPU machine without a network lacks to test and measure this project.
#
#   run_scripts/dev/bench/carry.sh                     # here; then take the checkout, with .gpu/, to that machine
#   source run_scripts/dev/bench/carried.sh            # there, in the checkout's root: installs .gpu/ for this shell
#
# That machine is taken to have Python 3.12, torch 2.11.0+cu130, triton 3.6.0, nvcc 13.0, ninja and the usual scientific
# packages. Versions are those of constraints-cuda.txt. SGLang runs there with engine.extra.attention_backend = "triton":
# FlashAttention 3 (1.8 GB) stays behind, and so does flashinfer (440 MB), which only sampling with top-p calls.
# With .venv, nvcc 13.0 and ninja here, the kernels that SGLang would compile there are compiled here (engine_kernels.py).
# .gpu/learner is all that a learner needs, and .gpu/engine is the rest. .gpu/te is Transformer Engine: its library with
# machine code for Hopper alone (thin.py), and its torch extension's sources. ten_te.py compiles them there; run here
# afterwards, it adds a wheel.
set -euo pipefail
cd "$(dirname "$0")/../../.."
learner=(megatron-core pydantic pydantic-core annotated-types typing-inspection typing-extensions tomli-w)
engine=(
  sglang sglang-kernel transformers tokenizers torch-memory-saver apache-tvm-ffi math-verify latex2sympy2-extended
  antlr4-python3-runtime openai jiter distro sniffio orjson pybase64 starlette fastapi annotated-doc opentelemetry-api
  uvicorn partial-json-parser msgspec compressed-tensors gguf loguru dill setproctitle pyzmq liger-kernel
)
te_version=2.11.0 # as in setup.sh
limit=$((64 << 20)) # of a call: the checkout's files and what it carries
archive=.gpu.partial work=$(mktemp -d)
trap 'rm -rf "$work" "$archive"' EXIT
rm -rf "$archive"
mkdir -p "$archive"/{learner,engine/tvm-ffi,te}
touch "$archive/engine/tvm-ffi/.keep" # a transfer may carry files only

pinned() { cat run_scripts/constraints-cuda.txt run_scripts/constraints-cpu.txt | grep -m 1 "^$1=="; }
pins() { for package in "$@"; do pinned "$package"; done; }
there=(--only-binary :all: --python-version 3.12 --implementation cp)
for tag in _2_35 _2_34 _2_28 _2_27 _2_26 _2_24 _2_17 2014 1; do there+=(--platform "manylinux${tag}_x86_64"); done
get() {  # packages into a folder, as that machine would choose and install them
  python3 -m pip install --quiet --disable-pip-version-check --no-deps --no-compile "${there[@]}" --target "$work/$1" "${@:2}"
}
mapfile -t wanted < <(pins "${learner[@]}")
get learner "${wanted[@]}"
mapfile -t wanted < <(pins "${engine[@]}")
get engine "${wanted[@]}"

mkdir -p "$work"/engine/{flashinfer,IPython}
cat > "$work/engine/flashinfer/__init__.py" <<'PY'
__version__ = "0.6.12"  # SGLang imports flashinfer.sampling on CUDA, but calls it for top-p, top-k and min-p only
PY
cat > "$work/engine/flashinfer/sampling.py" <<'PY'
def _absent(*_, **__):
    raise NotImplementedError("flashinfer was not carried: sample with top_p = 1")


min_p_sampling_from_probs = top_k_top_p_sampling_from_probs = _absent
PY
: > "$work/engine/IPython/__init__.py"
printf 'def display(*_, **__): ...\n\n\nclass HTML:\n    def __init__(self, *_, **__): ...\n' > "$work/engine/IPython/display.py"
if [ -x .venv/bin/python ] && [ -n "$(command -v nvcc)" ] && [ -n "$(command -v ninja)" ]; then
  .venv/bin/python -m pip install --quiet --no-deps --target "$work/tvm" "$(pinned apache-tvm-ffi)"
  cuda=${CUDA_HOME:-/usr/local/cuda}
  CUDA_HOME=$cuda LD_LIBRARY_PATH=$cuda/lib64 TVM_FFI_CACHE_DIR=$work/kernels PYTHONPATH=$work/tvm:. \
    .venv/bin/python -m run_scripts.dev.bench.engine_kernels
  (cd "$work/kernels" && find . -name '*.so' -exec cp --parents {} "$OLDPWD/$archive/engine/tvm-ffi/" \;)
fi

get te "transformer-engine-cu13==$te_version" "transformer-engine==$te_version"
library=$work/te/transformer_engine/wheel_lib/libtransformer_engine.so
python3 -m run_scripts.dev.bench.thin "$library" "$library" --architecture 90
python3 -m venv "$work/venv"
"$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check setuptools wheel packaging
# pip reads an archive's metadata by running its setup.py, which wants torch: names are enough.
mkdir -p "$work/stub/torch/utils"
printf '__version__ = "2.11.0"\n\n\nclass version:\n    cuda = "13.0"\n' > "$work/stub/torch/__init__.py"
: > "$work/stub/torch/utils/__init__.py"
cat > "$work/stub/torch/utils/cpp_extension.py" <<'PY'
from setuptools import Extension
from setuptools.command.build_ext import build_ext as BuildExtension  # noqa: F401


def CppExtension(*_, **__):
    return Extension("none", ["none.c"])


CUDAExtension = CppExtension
PY
PYTHONPATH=$work/stub "$work/venv/bin/python" -m pip download --quiet --disable-pip-version-check --no-deps \
  --dest "$archive/te" --no-binary :all: --no-build-isolation "transformer-engine-torch==$te_version"

# Of sglang-kernel's 587 MiB, one Hopper GPU without FlashAttention 3 needs 14.
export XZ_OPT=-1
for part in learner engine te; do
  tar cJf "$archive/$part/site.tar.xz" -C "$work/$part" --exclude='flash*.so' --exclude=sm100 .
done
rm -rf .gpu
mv "$archive" .gpu
files=$(git ls-files -z --cached --others --exclude-standard | du -bc --files0-from=- | tail -n 1 | cut -f 1)
for parts in "learner engine" "learner te"; do
  carried=$(cd .gpu && du -bc $parts | tail -n 1 | cut -f 1)
  echo "carry: the checkout has $((files >> 20)) MiB, $parts $((carried >> 20)) MiB, of 64 MiB"
  [ $((files + carried)) -le "$limit" ] || { echo "carry: that is more than a call takes" >&2; exit 1; }
done
