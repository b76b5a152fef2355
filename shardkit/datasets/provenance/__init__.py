"""Trace rows back to raw documents, and documents to their rows and to the training steps that used them.

`table` reads the dataset's provenance tables, by row or by a selection of `search`; `text` decodes tokens;
`run` computes where a training run delivers a row and which rows a step has; `outputs` writes results to
files; `answers` combines all of it for `shardkit trace`.
"""
