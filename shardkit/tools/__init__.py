"""The tools behind the commands of `shardkit`, above writers and loaders and below `shardkit.cli`.

Before a run, `plan` computes what a build or a training run needs. On datasets, `convert` translates formats,
`trace` maps rows to documents and steps and back, and `audit` proves that every sample is delivered exactly
once. `demo` runs all of these once. The tools return plain results; `shardkit.cli` prints them.
"""
