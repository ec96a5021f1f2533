# Unpacks what there is of .gpu/ (carry.sh) into ~/site, once, and sets this shell's environment. Source it in the
# checkout's root. Transformer Engine goes to ~/te, where only ten_te.py looks: Megatron imports it where it finds it, and
# fails while its torch extension is missing.
site=$HOME/site
mkdir -p "$site" ~/te
for part in learner engine te; do
  archive=.gpu/$part/site.tar.xz folder=$site
  [ "$part" != te ] || folder=$HOME/te
  if [ -f "$archive" ] && [ ! -f "$site/.$part" ]; then
    tar xJf "$archive" -C "$folder" || python3 -m tarfile -e "$archive" "$folder" || exit
    if [ -d ".gpu/$part/tvm-ffi" ]; then
      { mkdir -p ~/.cache/tvm-ffi && cp -r ".gpu/$part/tvm-ffi/." ~/.cache/tvm-ffi/; } || true # else compiled again
    fi
    touch "$site/.$part"
  fi
done
export PYTHONPATH=$site:$PWD PYTHONUNBUFFERED=1 TORCHINDUCTOR_COMPILE_THREADS=8
PATH=$(dirname "$(python3 -c 'import sys; print(sys.executable)')"):$PATH
# Of the folder above nvcc, which may be a script in /usr/local/bin, tvm-ffi would take a CUDA without libraries.
if [ -z "${CUDA_HOME:-}" ] && [ -x /usr/local/cuda/bin/nvcc ]; then export CUDA_HOME=/usr/local/cuda; fi
# flashinfer is a stub, and sgl_kernel's version is not asked of its metadata.
export SGLANG_IS_FLASHINFER_AVAILABLE=false SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK=1
# torch_memory_saver's library, which SGLang preloads, needs libcudart.
LD_LIBRARY_PATH=$(python3 -c 'import nvidia; print(list(nvidia.__path__)[0])')/cu13/lib:${LD_LIBRARY_PATH:-}
export PATH LD_LIBRARY_PATH
