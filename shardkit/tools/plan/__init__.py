"""Computes the needs of a build or a training run exactly: raw input, cores, disk, bandwidth, cost.

`build` and `train` are the two plans; `sampling` measures a recipe on part of its input. Quantities remain
`Fraction`s until they are printed, so that inverting a plan returns exactly its input.
"""
