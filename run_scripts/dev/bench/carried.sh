# Installs what there is of .gpu/ (carry.sh) into ~/site, once, and sets this shell's environment. Source it in the
# checkout's root.
site=$HOME/site
for part in learner engine; do
  if [ -d ".gpu/$part" ] && [ ! -f "$site/.$part" ]; then
    python3 -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$site" ".gpu/$part"/wheels/*.whl || exit
    if [ "$part" = engine ]; then
      tar xJf .gpu/engine/sgl_kernel.tar.xz -C "$site" || python3 -m tarfile -e .gpu/engine/sgl_kernel.tar.xz "$site" || exit
      cp -r .gpu/engine/stubs/. "$site/" || exit
      { mkdir -p ~/.cache/tvm-ffi && cp -r .gpu/engine/tvm-ffi/. ~/.cache/tvm-ffi/; } || true # else compiled again
    fi
    touch "$site/.$part"
  fi
done
if [ -d .gpu/te ] && [ ! -f "$site/.te" ]; then
  mkdir -p "$site"
  archive=.gpu/te/transformer_engine.tar.xz
  tar xJf "$archive" -C "$site" || python3 -m tarfile -e "$archive" "$site" || exit
  touch "$site/.te"
fi
export PYTHONPATH=$site:$PWD PYTHONUNBUFFERED=1 TORCHINDUCTOR_COMPILE_THREADS=8
PATH=$(dirname "$(python3 -c 'import sys; print(sys.executable)')"):$PATH
# Of the folder above nvcc, which may be a script in /usr/local/bin, tvm-ffi would take a CUDA without libraries.
if [ -z "${CUDA_HOME:-}" ] && [ -x /usr/local/cuda/bin/nvcc ]; then export CUDA_HOME=/usr/local/cuda; fi
# flashinfer is a stub, and sgl_kernel's version is not asked of its metadata.
export SGLANG_IS_FLASHINFER_AVAILABLE=false SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK=1
# torch_memory_saver's library, which SGLang preloads, needs libcudart.
LD_LIBRARY_PATH=$(python3 -c 'import nvidia; print(list(nvidia.__path__)[0])')/cu13/lib:${LD_LIBRARY_PATH:-}
export PATH LD_LIBRARY_PATH
