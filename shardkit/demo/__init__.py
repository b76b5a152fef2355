"""`shardkit demo`: the whole story on text that is already on the machine."""
