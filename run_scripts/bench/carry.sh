#!/usr/bin/env bash
# Makes .gpu/ (55 MiB, ignored by git): what a GPU machine without a network lacks to test and measure this project.
#
#   run_scripts/bench/carry.sh                     # here; then take the checkout, with .gpu/, to that machine
#   source run_scripts/bench/carried.sh            # there, in the checkout's root: installs .gpu/ for this shell
#
# That machine is taken to have Python 3.12, torch 2.11.0+cu130, triton 3.6.0, nvcc 13.0, ninja and the usual scientific
# packages. Versions are those of constraints-cuda.txt. SGLang runs there with engine.extra.attention_backend = "triton":
# FlashAttention 3 (1.8 GB) stays behind, and so does flashinfer (440 MB), which only sampling with top-p calls.
# TVM_CACHE=DIR adds kernels that SGLang has compiled before (TVM_FFI_CACHE_DIR); else they are compiled there.
# .gpu/learner (5 MiB) is all that a learner needs, and .gpu/engine is the rest.
set -euo pipefail
cd "$(dirname "$0")/../.."
learner=(megatron-core pydantic pydantic-core annotated-types typing-inspection typing-extensions tomli-w)
engine=(
  sglang transformers tokenizers torch-memory-saver apache-tvm-ffi math-verify latex2sympy2-extended
  antlr4-python3-runtime openai jiter distro sniffio orjson pybase64 starlette fastapi annotated-doc opentelemetry-api
  uvicorn partial-json-parser msgspec compressed-tensors gguf loguru dill setproctitle pyzmq liger-kernel
)
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
if [ -n "${TVM_CACHE:-}" ]; then
  for folder in "$TVM_CACHE"/*/; do
    mkdir -p "$out/tvm-ffi/$(basename "$folder")"
    cp "$folder"*.so "$out/tvm-ffi/$(basename "$folder")/"
  done
fi
rm -rf .gpu
mv "$archive" .gpu
echo "carry: .gpu/ has $(du -sm .gpu | cut -f1) MiB"
