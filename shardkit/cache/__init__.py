"""The node cache: shards of remote datasets on a local disk or in memory, fetched before they are needed."""
