"""`python -m mugrpo_megatron` is `mugrpo`; torchrun starts it as a module."""

import os
import sys

# `python -m` looks for modules in the current directory first; a file next to the data must not replace a library.
if not sys.flags.safe_path and sys.path[0] == os.getcwd():
    sys.path.append(sys.path.pop(0))

from mugrpo_megatron.cli import main

if __name__ == "__main__":
    sys.exit(main())
