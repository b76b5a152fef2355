"""Proofs that every sample is delivered exactly once: of a plan before a run, of a run by its usage logs."""
