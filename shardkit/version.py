"""The version, for modules that write it into files: a leaf, so that they import nothing else for it."""

__version__ = "0.2.0"
