"""Brings records with equal keys together, from all splits: sorted runs, and merges of them."""
