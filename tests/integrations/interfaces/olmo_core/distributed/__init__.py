"""Processes of a run."""
