"""`shardkit demo`: the whole story on text that every Python installation already has. No download."""
