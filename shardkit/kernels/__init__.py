"""Compiled loops over byte buffers that writers and datasets share: Numba, UTF-8, Arrow texts."""
