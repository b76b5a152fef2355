"""shardkit: raw text to deterministic pretraining shards, and those shards to GPUs, exactly once."""

__all__ = ["__version__"]

__version__ = "0.1.0"
