"""From a row back to its raw documents, from a document to its rows, and to the training steps that saw them.

`table` reads the provenance tables next to the shards, by row or by what `search` selects; `text` decodes
tokens; `run` computes where a training run delivers a row and which rows a step has; `outputs` writes what
was found; `answers` puts all of it together, as `shardkit trace` prints it.
"""
