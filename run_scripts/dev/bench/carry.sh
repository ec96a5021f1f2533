#!/usr/bin/env bash
# Makes .gpu/ (67 MiB, ignored by git): what a GPU machine without a network lacks to test and measure this project.
#
#   run_scripts/dev/bench/carry.sh                     # here; then take the checkout, with .gpu/, to that machine
#   source run_scripts/dev/bench/carried.sh            # there, in the checkout's root: installs .gpu/ for this shell
#
# That machine is taken to have Python 3.12, torch 2.11.0+cu130, triton 3.6.0, nvcc 13.0, ninja and the usual scientific
# packages. Versions are those of constraints-cuda.txt. SGLang runs there with engine.extra.attention_backend = "triton":
# FlashAttention 3 (1.8 GB) stays behind, and so does flashinfer (440 MB), which only sampling with top-p calls.
# With .venv, nvcc 13.0 and ninja here, the kernels that SGLang would compile there are compiled here (engine_kernels.py).
# .gpu/learner (5 MiB) is all that a learner needs, and .gpu/engine is the rest. .gpu/te (10 MiB) is Transformer Engine:
# its library with machine code for Hopper alone (thin.py), and the sources of its torch extension, compiled there.
set -euo pipefail
cd "$(dirname "$0")/../../.."
learner=(megatron-core pydantic pydantic-core annotated-types typing-inspection typing-extensions tomli-w)
engine=(
  sglang transformers tokenizers torch-memory-saver apache-tvm-ffi math-verify latex2sympy2-extended
  antlr4-python3-runtime openai jiter distro sniffio orjson pybase64 starlette fastapi annotated-doc opentelemetry-api
  uvicorn partial-json-parser msgspec compressed-tensors gguf loguru dill setproctitle pyzmq liger-kernel
)
te_version=2.11.0 # as in setup.sh
archive=.gpu.partial work=$(mktemp -d)
out=$archive/engine
trap 'rm -rf "$work" "$archive"' EXIT
rm -rf "$archive"
mkdir -p "$archive/learner/wheels" "$out/wheels" "$out/stubs/flashinfer" "$out/stubs/IPython" "$out/tvm-ffi"
touch "$out/tvm-ffi/.keep" # a transfer may carry files only

platforms=()
for tag in _2_35 _2_34 _2_28 _2_27 _2_26 _2_24 _2_17 2014 1; do platforms+=(--platform "manylinux${tag}_x86_64"); done
pinned() { cat run_scripts/constraints-cuda.txt run_scripts/constraints-cpu.txt | grep -m 1 "^$1=="; }
get() {  # the wheel of one package into a folder, as that machine would choose it
  python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: --python-version 3.12 \
    --implementation cp "${platforms[@]}" --dest "$1" "$(pinned "$2")"
}
for package in "${learner[@]}"; do get "$archive/learner/wheels" "$package"; done
for package in "${engine[@]}"; do get "$out/wheels" "$package"; done

# 587 MiB, of which one Hopper GPU without FlashAttention 3 needs 14: every Python file, and two of the libraries.
get "$work" sglang-kernel
python3 -m zipfile -e "$work"/sglang_kernel-*.whl "$work/all"
tar cJf "$out/sgl_kernel.tar.xz" -C "$work/all" --exclude='flash*.so' --exclude=sm100 .

cat > "$out/stubs/flashinfer/__init__.py" <<'PY'
__version__ = "0.6.12"  # SGLang imports flashinfer.sampling on CUDA, but calls it for top-p, top-k and min-p only
PY
cat > "$out/stubs/flashinfer/sampling.py" <<'PY'
def _absent(*_, **__):
    raise NotImplementedError("flashinfer was not carried: sample with top_p = 1")


min_p_sampling_from_probs = top_k_top_p_sampling_from_probs = _absent
PY
: > "$out/stubs/IPython/__init__.py"
printf 'def display(*_, **__): ...\n\n\nclass HTML:\n    def __init__(self, *_, **__): ...\n' > "$out/stubs/IPython/display.py"
if [ -x .venv/bin/python ] && [ -n "$(command -v nvcc)" ] && [ -n "$(command -v ninja)" ]; then
  .venv/bin/python -m pip install --quiet --no-deps --target "$work/tvm" "$(pinned apache-tvm-ffi)"
  cuda=${CUDA_HOME:-/usr/local/cuda}
  CUDA_HOME=$cuda LD_LIBRARY_PATH=$cuda/lib64 TVM_FFI_CACHE_DIR=$work/kernels PYTHONPATH=$work/tvm:. \
    .venv/bin/python -m run_scripts.dev.bench.engine_kernels
  (cd "$work/kernels" && find . -name '*.so' -exec cp --parents {} "$OLDPWD/$out/tvm-ffi/" \;)
fi
# 171 MiB, of which one Hopper GPU needs 9.
mkdir -p "$archive/te"
python3 -m venv "$work/venv"
"$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check setuptools wheel packaging
get_te() { "$work/venv/bin/python" -m pip download --quiet --disable-pip-version-check --no-deps --dest "$work/te" "$@"; }
get_te --only-binary :all: --python-version 3.12 --implementation cp "${platforms[@]}" \
  "transformer-engine-cu13==$te_version" "transformer-engine==$te_version"
for wheel in "$work"/te/*.whl; do python3 -m zipfile -e "$wheel" "$work/all-te"; done
library=$work/all-te/transformer_engine/wheel_lib/libtransformer_engine.so
python3 -m run_scripts.dev.bench.thin "$library" "$library" --architecture 90
XZ_OPT=-3 tar -cJf "$archive/te/transformer_engine.tar.xz" -C "$work/all-te" .
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
PYTHONPATH=$work/stub get_te --no-binary :all: --no-build-isolation "transformer-engine-torch==$te_version"
cp "$work"/te/*.tar.gz "$archive/te/"
rm -rf .gpu
mv "$archive" .gpu
echo "carry: .gpu/ has $(du -sm .gpu | cut -f1) MiB"
