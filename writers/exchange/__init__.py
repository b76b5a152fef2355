"""Brings rows with equal keys from all splits together, by sorted runs and merges of runs."""
