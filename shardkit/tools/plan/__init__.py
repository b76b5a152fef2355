"""What a dataset and a training run will need, by exact arithmetic: raw input, cores, disk, bandwidth, cost.

`build` and `train` are the two plans, `sampling` measures a recipe on part of its input. Quantities are
`Fraction`s until they are shown, so that an inverted plan gives back its input.
"""
