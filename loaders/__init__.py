"""Online loaders: shards to batches in an order that is arithmetic, resumable at every step."""

__all__: list[str] = []
