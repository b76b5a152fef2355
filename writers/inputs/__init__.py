"""What a recipe names as input: files found and cut into splits, records read as batches of documents.

README.md of this folder shows the modules in the order in which a record passes them.
"""
