"""The tools behind the commands of `shardkit`, above writers and loaders and below `shardkit.cli`.

Before a run, `plan` computes what a build or a training run needs. On datasets, `convert` translates formats,
`trace` leads from rows to documents and steps and back, and `audit` proves that every sample is delivered
exactly once. `demo` does it all once. They return plain results; printing is left
to `shardkit.cli`.
"""
