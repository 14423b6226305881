"""Kernels that the Triton backends share, each beside its launcher."""
