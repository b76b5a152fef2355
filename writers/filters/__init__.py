"""Document filters: published rules as named, parameterised profiles over columnar batches."""
