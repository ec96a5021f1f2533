"""`python -m mugrpo_megatron` is `mugrpo`; torchrun starts it as a module."""

import os
import sys

# `python -m` looks for modules in the current directory first. A file that lies there by chance must neither replace a
# library nor stand in for an optional one. Code that imports a user's function adds the directory itself.
if not sys.flags.safe_path and sys.path[0] == os.getcwd():
    del sys.path[0]

from mugrpo_megatron.cli import main

if __name__ == "__main__":
    sys.exit(main())
