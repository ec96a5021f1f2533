"""What the `mugrpo` command does besides training."""
