"""One thin module for each trainer, in the trainer's own names.

Each imports its trainer's package: import only the one you use.
"""
