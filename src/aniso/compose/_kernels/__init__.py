"""Compiled CPU kernels that add and multiply stored task vectors; optional (numba)."""
