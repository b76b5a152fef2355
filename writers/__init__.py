"""Offline builds: raw text to shards with an index, provenance and a report."""

__all__: list[str] = []
