"""Proves that every sample is delivered exactly once: from the plan before a run, or from its usage logs."""
