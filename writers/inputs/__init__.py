"""What a recipe names as input: files found and cut into splits, records read as batches of documents.

See README.md of this folder for the rooms.
"""
