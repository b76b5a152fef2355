"""The order of training samples: pure arithmetic from a few integers to a shard and a row."""
