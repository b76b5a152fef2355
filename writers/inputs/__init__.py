"""Finds the input files of a recipe, cuts them into splits, and reads their records as batches of documents.

README.md of this folder shows the modules in the order in which a record passes them.
"""
