"""Executes compiled gfx942 and gfx950 kernels on the CPU with NumPy; see README.md."""
