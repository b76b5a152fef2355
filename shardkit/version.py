"""The version, in a module without imports so that reading it imports nothing else."""

__version__ = "0.2.0"
