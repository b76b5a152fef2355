"""Documents of a group as one text, and fill-in-the-middle: what a build does around `shardkit.tokens`."""
