"""Runs the `mugrpo` command as `python -m mugrpo_megatron`, so that torchrun can start it on every rank."""

import os
import sys

# `python -m` puts the current directory first in `sys.path`, so a file there would be imported in place of a library of
# the same name, or of an optional one that is not installed. Therefore the directory is removed. `load_function`
# appends it when a user's function may be in it.
if not sys.flags.safe_path and sys.path[0] == os.getcwd():
    del sys.path[0]

from mugrpo_megatron.cli import main

if __name__ == "__main__":
    sys.exit(main())
