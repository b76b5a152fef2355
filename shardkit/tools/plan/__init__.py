"""What a dataset and a training run will need, by arithmetic: raw input, cores, disk, bandwidth, cache, cost.

Nothing here reads a file or a clock. Quantities are exact (`Fraction`) until they are shown, so that a plan
turned around gives back what it was made from. `build` and `train` are the two plans.
"""
