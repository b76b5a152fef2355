"""One thin module per trainer, which uses the trainer's own names.

Each module imports its trainer's package: import only the one you use.
"""
